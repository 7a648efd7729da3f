"""The C ABI of libmoeforge (include/moeforge.h) in ctypes, and the search for the library.

The structs are tables of (name, type) in the header's order; tests/test_abi.py compiles a C program against the header and compares every size and
offset. A struct that is longer than the library knows is accepted by it as long as the new fields are 0, so fields that only newer libraries have
(NEWER_FIELDS) are harmless with older ones.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Optional

from .errors import LibraryNotFound

_PROBLEM_INTS = (
    "experts", "top_k", "hidden", "intermediate", "intermediate_offset", "expert_begin", "expert_count", "zero_experts", "score", "select_bias",
    "groups", "groups_kept", "renormalize", "weight_on_input", "logits_dtype", "act_scale", "shared_experts",
)


class CProblem(ctypes.Structure):
    """struct mf_problem"""

    _fields_ = [("struct_size", c_uint32), *((name, c_int32) for name in _PROBLEM_INTS), ("swiglu_limit", c_float), ("swiglu_alpha", c_float)]


class CWeights(ctypes.Structure):
    """struct mf_weights"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("w13", c_void_p),
        ("s13", c_void_p),
        ("w2", c_void_p),
        ("s2", c_void_p),
        ("bias", c_void_p),
        ("w13_row_stride", c_int64),
        ("w2_row_stride", c_int64),
        ("routed_scaling", c_float),
        ("reserved_f", c_float),
    ]


class CCall(ctypes.Structure):
    """struct mf_call"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("tokens", c_int32),
        ("x", c_void_p),
        ("logits", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
        ("x_stride", c_int64),
        ("logits_stride", c_int64),
        ("out_stride", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("ids_stride", c_int64),
        ("weights_stride", c_int64),
        ("shared_gate", c_void_p),
        ("shared_gate_stride", c_int64),
    ]


class CPackageEntry(ctypes.Structure):
    """struct mf_package_entry"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("tokens_min", c_int32),
        ("tokens_max", c_int32),
        ("min_driver", c_int32),
        ("shape_name", c_char_p),
        ("device_name", c_char_p),
        ("schedule", c_char_p),
        ("problem", CProblem),
        ("routed_scaling", c_float),
        ("us", c_double),
        ("floor_us", c_double),
    ]


STRUCTS = {"mf_problem": CProblem, "mf_weights": CWeights, "mf_call": CCall, "mf_package_entry": CPackageEntry}

# Fields at the end of a struct that not every libmoeforge has. They are read only for problems (score "given", gated shared experts) that such a library
# has no package entry for.
NEWER_FIELDS = {"mf_call": ("ids", "weights", "ids_stride", "weights_stride", "shared_gate", "shared_gate_stride")}

# name: (result, arguments)
FUNCTIONS = {
    "mf_status_string": (c_char_p, [c_int]),
    "mf_status_name": (c_char_p, [c_int]),
    "mf_package_open": (c_int, [c_char_p, POINTER(c_void_p)]),
    "mf_package_entry_at": (c_int, [c_void_p, c_size_t, POINTER(CPackageEntry)]),
    "mf_package_manifest": (c_char_p, [c_void_p]),
    "mf_package_close": (None, [c_void_p]),
    "mf_op_create": (c_int, [c_void_p, POINTER(CProblem), c_int, c_int, POINTER(c_void_p)]),
    "mf_op_workspace_size": (c_size_t, [c_void_p]),
    "mf_op_max_tokens": (c_int, [c_void_p]),
    "mf_workspace_init": (c_int, [c_void_p, c_void_p, c_void_p]),
    "mf_op_destroy": (None, [c_void_p]),
    "mf_layer_bind": (c_int, [c_void_p, POINTER(CWeights), POINTER(c_void_p)]),
    "mf_moe_forward": (c_int, [c_void_p, POINTER(CCall), c_void_p]),
    "mf_layer_destroy": (None, [c_void_p]),
}

LIBRARY_NAME = "libmoeforge.so"
_lock = threading.Lock()
_library: Optional[ctypes.CDLL] = None


def _candidates() -> list[str]:
    """Where the library may be, best first: MOEFORGE_LIBRARY alone if it is set, the wheel's own, a checkout's build, the system's."""
    given = os.environ.get("MOEFORGE_LIBRARY")
    if given:
        return [given]
    here = Path(__file__).resolve().parent
    files = [here / LIBRARY_NAME]
    if here.parent.name == "src":
        files.append(here.parents[2] / "build" / LIBRARY_NAME)
    return [*(str(f) for f in files if f.exists()), LIBRARY_NAME + ".1"]


def library() -> ctypes.CDLL:
    """The loaded libmoeforge with the prototypes set. Raises LibraryNotFound with the reason of the last attempt."""
    global _library
    with _lock:
        if _library is None:
            _library = _load()
        return _library


def _load() -> ctypes.CDLL:
    names = _candidates()
    why = ""
    for name in names:
        try:
            lib = ctypes.CDLL(name)
            for symbol, (result, arguments) in FUNCTIONS.items():
                function = getattr(lib, symbol)
                function.restype, function.argtypes = result, arguments
            return lib
        except (OSError, AttributeError) as error:
            why = str(error)
    raise LibraryNotFound(
        f"libmoeforge cannot be loaded ({why}): install a wheel that `make wheel` made, run `make` in the checkout, or name the file in MOEFORGE_LIBRARY"
    )
