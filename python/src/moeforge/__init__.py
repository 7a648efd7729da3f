"""moeforge: tuned fused mixture-of-experts decode kernels, from a package file.

    import moeforge
    with moeforge.load("model.moeforge") as package:
        op = package.op(package.problem(), device=0)
        layer = op.bind(moeforge.Weights(w13, s13, w2, s2))
        layer.forward(tokens=4, x=x, logits=logits, out=out, workspace=workspace, stream=stream)

This module needs the standard library and libmoeforge.so only. `moeforge.torch` has the same on tensors, `moeforge.vllm_plugin` for vLLM.
"""

from .errors import (
    CorruptPackage,
    DeviceError,
    LibraryNotFound,
    Miss,
    MissDevice,
    MissDriver,
    MissLayout,
    MissShape,
    MissSms,
    MissTokens,
    MoeforgeError,
    NewerFormat,
    NoDevice,
    NotFound,
    OutOfMemory,
    PackageIOError,
    Status,
    UsageError,
)
from .package import ActScale, Dtype, Entry, Layer, Op, Package, Problem, Score, Weights, load

__version__ = "0.1.0"

__all__ = [
    "ActScale", "CorruptPackage", "DeviceError", "Dtype", "Entry", "Layer", "LibraryNotFound", "Miss", "MissDevice", "MissDriver", "MissLayout", "MissShape",
    "MissSms", "MissTokens", "MoeforgeError", "NewerFormat", "NoDevice", "NotFound", "Op", "OutOfMemory", "Package", "PackageIOError", "Problem", "Score",
    "Status", "UsageError", "Weights", "load",
]
