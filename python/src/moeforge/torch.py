"""moeforge on torch tensors: a custom op that torch.compile and CUDA graphs take as they take torch's own.

    import moeforge, moeforge.torch
    package = moeforge.load("model.moeforge")
    moe = moeforge.torch.Moe(package, package.problem())          # once per model shape and GPU
    layer = moe.bind(w13, s13, w2, s2)                            # once per layer; weights stay where they are
    y = layer(x, router_logits)                                   # torch.ops.moeforge.fused_moe

Weights are in the checkpoint's layout: w13 [E, 2N, K] and w2 [E, K, N] float8_e4m3fn; s13 [E, 2 * nb, kb] (or [E, 2, nb, kb]) and s2 [E, kb, nb] float32,
where nb and kb are numbers of 128-blocks. x and the result are bfloat16 [tokens, K]. Inference only: the op has no gradient.

Workspaces: a call needs one that no call on another stream uses at the same time. Each Moe keeps one per stream, from torch's allocator. A few are made with
the Moe, so that forward allocates nothing but its result, and a stream that is first seen inside a CUDA graph capture gets one that is ready. A graph
keeps the workspace of the stream that it was captured on: do not replay two graphs of one capture stream at the same time (torch.cuda.graph captures on
one stream of its own unless it is given another).
"""

import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from typing import Any, ContextManager, Optional

import torch
from torch import Tensor

from .errors import DeviceError, MissLayout, MissTokens, UsageError
from .package import Dtype, Package, Problem, Score, Weights
from .package import Layer as NativeLayer

_LOGITS = {Dtype.BF16: torch.bfloat16, Dtype.F32: torch.float32}
_SPARE_WORKSPACES = 3  # the current stream, a side stream that warms up, a stream that captures


class _Cuda:
    """What this module needs of torch.cuda, in one place, so that tests can put a scripted GPU there."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._thread = threading.local()

    def stream(self, device: torch.device) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def on(self, device: torch.device) -> ContextManager[Any]:
        """The device's primary context is current: torch's default stream is stream 0, which is that of whichever context is current."""
        if torch.cuda.current_device() == device.index:
            if device.index not in getattr(self._thread, "known", ()):
                self.make_current(device.index)
            return contextlib.nullcontext()
        other: ContextManager[Any] = torch.cuda.device(device)
        return other

    def make_current(self, index: int) -> None:
        """In a thread that has not used CUDA, torch may answer from its caches without any call that makes the context current. Once for each device:
        torch goes back to a device whose context exists by a real call."""
        driver = ctypes.CDLL(os.environ.get("MOEFORGE_LIBCUDA") or "libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        code = driver.cuDeviceGet(ctypes.byref(device), index)
        code = code or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # torch retains it for as long as the process lives, too
        code = code or driver.cuCtxSetCurrent(context)
        if code != 0:
            raise DeviceError(f"the context of device {index} cannot be made current: CUDA error {code}: {DeviceError.advice}")
        self._thread.known = {*getattr(self._thread, "known", ()), index}

    def workspace(self, size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()


_runtime = _Cuda()


# ---- checks ----
def _expect(tensor: Tensor, name: str, dtype: torch.dtype, shape: "tuple[int, ...]", device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise UsageError(f"{name} is {tensor.dtype}, expected {dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise UsageError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.device != device:
        raise UsageError(f"{name} is on {tensor.device}, the layer is on {device}")


def _dense(tensor: Tensor, name: str) -> int:
    """The address of a tensor without gaps."""
    if not tensor.is_contiguous():
        raise MissLayout(f"{name} has strides {tensor.stride()}: it must be contiguous")
    return int(tensor.data_ptr())


def _matrix(tensor: Tensor, name: str) -> int:
    """The row stride of experts' matrices that follow each other without a gap; rows may be padded."""
    _, rows, columns = tensor.shape
    stride = tensor.stride()
    if stride[2] != 1 or stride[1] < columns or stride[0] != rows * stride[1]:
        raise MissLayout(f"{name} has strides {stride}: columns must be dense and the experts must follow each other without a gap")
    return int(stride[1])


def _rows(tensor: Tensor, name: str) -> int:
    """The row stride of a matrix whose rows are dense and begin at multiples of 16 bytes."""
    tokens, columns = tensor.shape
    stride, bytes_each = tensor.stride(), tensor.element_size()
    if stride[1] != 1 and columns > 1 or tokens > 1 and (stride[0] < columns or stride[0] * bytes_each % 16 != 0) or tensor.data_ptr() % 16 != 0:
        raise MissLayout(f"{name} has strides {stride} at address {tensor.data_ptr():#x}: rows must be dense and begin at multiples of 16 bytes")
    return int(stride[0]) if tokens > 1 else 0


# ---- workspaces ----
class _Workspaces:
    """One workspace per stream. None is made while a stream is captured: it takes one that was made before."""

    def __init__(self, moe: "Moe") -> None:
        self._op, self._device = moe.op, moe.device
        self._of: "dict[int, Tensor]" = {}
        self._lock = threading.Lock()
        self._spare = [self._make() for _ in range(_SPARE_WORKSPACES)]
        _runtime.synchronize(self._device)  # a spare one may go to any stream

    def _make(self) -> Tensor:
        memory = _runtime.workspace(self._op.workspace_size, self._device)
        self._op.init_workspace(memory.data_ptr(), _runtime.stream(self._device))
        return memory

    def address(self, stream: int) -> int:
        memory = self._of.get(stream)
        return int((memory if memory is not None else self._assign(stream)).data_ptr())

    def _assign(self, stream: int) -> Tensor:
        with self._lock:
            if stream not in self._of:
                if self._spare:
                    self._of[stream] = self._spare.pop()
                elif _runtime.capturing():
                    raise UsageError("no workspace is left for the stream of this capture: call prepare() of the Moe on that stream before the capture")
                else:
                    self._of[stream] = self._make()
            return self._of[stream]

    def reset(self) -> None:
        for memory in [*self._of.values(), *self._spare]:
            self._op.init_workspace(memory.data_ptr(), _runtime.stream(self._device))
        _runtime.synchronize(self._device)


# ---- objects ----
_layers: "weakref.WeakValueDictionary[int, Layer]" = weakref.WeakValueDictionary()
_handles = itertools.count(1)


class Moe:
    """The kernels of one problem on one GPU, and their workspaces. Raises a moeforge.Miss if the package does not serve it."""

    def __init__(self, package: Package, problem: Problem, *, device: Any = None, max_tokens: Optional[int] = None) -> None:
        self.device = torch.device(device if device is not None else _runtime.device_type)
        if self.device.type != _runtime.device_type:
            raise UsageError(f"device {self.device}: expected a CUDA device")
        if self.device.index is None and self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.problem = problem
        self.op = package.op(problem, self.device.index or 0, max_tokens)
        self.max_tokens = self.op.max_tokens
        with _runtime.on(self.device):
            self.workspaces = _Workspaces(self)

    def prepare(self) -> None:
        """Makes the workspace of the current stream. Needed only before a capture, if more than three streams are in use."""
        with _runtime.on(self.device):
            self.workspaces.address(_runtime.stream(self.device))

    def reset(self) -> None:
        """Initialises all workspaces again: after a launch was aborted, when nothing of this Moe is running."""
        with _runtime.on(self.device):
            self.workspaces.reset()

    def bind(self, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, *, bias: Optional[Tensor] = None, routed_scaling: float = 1.0) -> "Layer":
        """Binds one layer's weights, which stay where they are. `bias` is the selection bias, needed if the problem has one."""
        return Layer(self, w13, s13, w2, s2, bias, routed_scaling)


class Layer:
    """One layer. It keeps its weights alive."""

    def __init__(self, moe: Moe, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, bias: Optional[Tensor], routed_scaling: float) -> None:
        p, device = moe.problem, moe.device
        e8, f32 = torch.float8_e4m3fn, torch.float32
        held = p.expert_count + p.shared_count
        _expect(w13, "w13", e8, (held, 2 * p.intermediate, p.hidden), device)
        _expect(w2, "w2", e8, (held, p.hidden, p.intermediate), device)
        halves = (2, p.n_blocks) if s13.dim() == 4 else (2 * p.n_blocks,)
        _expect(s13, "s13", f32, (held, *halves, p.k_blocks), device)
        _expect(s2, "s2", f32, (held, p.k_blocks, p.n_blocks), device)
        if (bias is not None) != bool(p.select_bias):
            raise UsageError(f"the problem has {'a' if p.select_bias else 'no'} selection bias, and bias is {'missing' if p.select_bias else 'given'}")
        if bias is not None:
            _expect(bias, "bias", f32, (p.logits,), device)
        self.moe, self.problem, self.max_tokens = moe, p, moe.max_tokens
        self.tensors = (w13, s13, w2, s2, bias)
        weights = Weights(
            w13.data_ptr(), _dense(s13, "s13"), w2.data_ptr(), _dense(s2, "s2"), _dense(bias, "bias") if bias is not None else 0,
            _matrix(w13, "w13"), _matrix(w2, "w2"), routed_scaling,
        )
        self.native: NativeLayer = moe.op.bind(weights)
        self.handle = next(_handles)
        _layers[self.handle] = self

    def __call__(self, x: Tensor, router_logits: Tensor, shared_gate: Optional[Tensor] = None) -> Tensor:
        """The layer on x [tokens, hidden]; routing from the logits [tokens, experts] is part of the kernel.

        shared_gate [tokens, shared experts], of the logits' dtype, if the problem has gated shared experts: they weigh its sigmoid.
        """
        return fused_moe(x, router_logits, *self.tensors[:4], layer=self, bias=self.tensors[4], shared_gate=shared_gate)

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, shared_gate: Optional[Tensor] = None) -> Tensor:
        """The same where the engine has routed (score GIVEN): ids int32 [tokens, top_k], -1 for none; weights float32 [tokens, top_k]."""
        return fused_experts(x, topk_ids, topk_weights, *self.tensors[:4], layer=self, shared_gate=shared_gate)

    def launch(
        self, x: Tensor, router_logits: Optional[Tensor] = None, topk_ids: Optional[Tensor] = None, topk_weights: Optional[Tensor] = None,
        shared_gate: Optional[Tensor] = None,
    ) -> Tensor:
        """What the ops do, without torch's dispatcher: for engines that already are inside an op of their own."""
        tokens = x.shape[0]
        p, device = self.problem, self.moe.device
        _expect(x, "x", torch.bfloat16, (tokens, p.hidden), device)
        arguments = {"x": x.data_ptr(), "x_stride": _rows(x, "x")}
        if p.score == Score.GIVEN:
            if topk_ids is None or topk_weights is None:
                raise UsageError("this layer takes topk_ids and topk_weights: its problem's score is GIVEN")
            _expect(topk_ids, "topk_ids", torch.int32, (tokens, p.top_k), device)
            _expect(topk_weights, "topk_weights", torch.float32, (tokens, p.top_k), device)
            arguments.update(ids=_dense(topk_ids, "topk_ids"), weights=_dense(topk_weights, "topk_weights"))
        else:
            if router_logits is None:
                raise UsageError("this layer takes router_logits: it routes by itself")
            _expect(router_logits, "router_logits", _LOGITS[Dtype(p.logits_dtype)], (tokens, p.logits), device)
            arguments.update(logits=router_logits.data_ptr(), logits_stride=_rows(router_logits, "router_logits"))
        if p.shared_gated != (shared_gate is not None):
            raise UsageError("shared_gate belongs to problems with gated shared experts, and to no others")
        if shared_gate is not None:
            _expect(shared_gate, "shared_gate", _LOGITS[Dtype(p.logits_dtype)], (tokens, p.shared_count), device)
            arguments.update(shared_gate=_dense(shared_gate, "shared_gate"))
        if tokens > self.max_tokens:
            raise MissTokens(f"{tokens} tokens, the layer serves up to {self.max_tokens}: {MissTokens.advice}")
        out = torch.empty((tokens, p.hidden), dtype=torch.bfloat16, device=device)
        if tokens > 0:
            with _runtime.on(device):
                stream = _runtime.stream(device)
                self.native.forward(tokens=tokens, out=out.data_ptr(), workspace=self.moe.workspaces.address(stream), stream=stream, **arguments)
        return out


# ---- the ops ----
def _layer_of(handle: int, w13: Tensor, w2: Tensor) -> Layer:
    layer = _layers.get(handle)
    if layer is None:
        raise UsageError(f"layer {handle} is gone: keep the Layer object as long as the model runs")
    if layer.native.weights.w13 != w13.data_ptr() or layer.native.weights.w2 != w2.data_ptr():
        raise UsageError("these are not the weights that the layer was bound to: bind them")
    return layer


@torch.library.custom_op("moeforge::fused_moe", mutates_args=())
def _fused_moe(
    x: Tensor, router_logits: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, bias: Optional[Tensor], shared_gate: Optional[Tensor], layer: int
) -> Tensor:
    return _layer_of(layer, w13, w2).launch(x, router_logits, shared_gate=shared_gate)


@torch.library.custom_op("moeforge::fused_experts", mutates_args=())
def _fused_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, shared_gate: Optional[Tensor], layer: int
) -> Tensor:
    return _layer_of(layer, w13, w2).launch(x, topk_ids=topk_ids, topk_weights=topk_weights, shared_gate=shared_gate)


@_fused_moe.register_fake
def _(x, router_logits, w13, s13, w2, s2, bias, shared_gate, layer):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@_fused_experts.register_fake
def _(x, topk_ids, topk_weights, w13, s13, w2, s2, shared_gate, layer):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def fused_moe(
    x: Tensor, router_logits: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, *, layer: Layer, bias: Optional[Tensor] = None,
    shared_gate: Optional[Tensor] = None,
) -> Tensor:
    """torch.ops.moeforge.fused_moe. The weights are those of the layer; they are arguments so that a compiled graph knows what is read."""
    out: Tensor = _fused_moe(x, router_logits, w13, s13, w2, s2, bias, shared_gate, layer.handle)
    return out


def fused_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, *, layer: Layer,
    shared_gate: Optional[Tensor] = None,
) -> Tensor:
    """torch.ops.moeforge.fused_experts: routing done by the caller."""
    out: Tensor = _fused_experts(x, topk_ids, topk_weights, w13, s13, w2, s2, shared_gate, layer.handle)
    return out


__all__ = ["Layer", "Moe", "fused_experts", "fused_moe"]
