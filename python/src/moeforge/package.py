"""Package, Op and Layer: the objects of libmoeforge, on raw device pointers. Nothing here needs torch.

Ownership: a Package opens a file, an Op holds the kernels of one problem on one GPU, a Layer the launch parameters of one layer's weights. Each is ended
by close(), by leaving its `with` block, or when it is collected. The library wants layers ended before ops and ops before packages; a handle that
still has users is ended with the last of them, so the order in which you close does not matter.

Device memory (weights, workspace, inputs, outputs) is the caller's and must outlive the layer and the launched work.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import os
import threading
from typing import Any, Callable, Iterator, Optional, Union

from . import _abi
from .errors import NotFound, Status, UsageError, error_of


class Score(enum.IntEnum):
    """How router logits become scores (enum mf_score). GIVEN: the engine has routed, a call passes ids and weights."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRT_SOFTPLUS = 2
    TOPK_SOFTMAX = 3
    GIVEN = 4


class Dtype(enum.IntEnum):
    """enum mf_dtype"""

    BF16 = 0
    F32 = 1


class ActScale(enum.IntEnum):
    """enum mf_act_scale"""

    F32 = 0
    UE8M0 = 1


SHARED_GATED = 256  # MF_SHARED_GATED


@dataclasses.dataclass(frozen=True)
class Problem:
    """The operator that a layer needs on one rank (struct mf_problem). Two problems with equal fields are the same problem.

    Matrices: w13 [expert_count][2 * intermediate][hidden], w2 [expert_count][hidden][intermediate], e4m3.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    intermediate_offset: int = 0
    expert_begin: int = 0
    expert_count: int = 0  # 0: all experts
    zero_experts: int = 0
    score: int = Score.SOFTMAX
    select_bias: int = 0
    groups: int = 1
    groups_kept: int = 1
    renormalize: int = 0
    weight_on_input: int = 0
    logits_dtype: int = Dtype.BF16
    act_scale: int = ActScale.F32
    shared_experts: int = 0  # + SHARED_GATED if they are gated
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0  # 0 or 1: SiLU

    def __post_init__(self) -> None:
        same: dict[str, float] = {"expert_count": self.expert_count or self.experts, "groups": self.groups or 1, "groups_kept": self.groups_kept or 1}
        same["swiglu_limit"] = ctypes.c_float(self.swiglu_limit).value  # as the library stores it
        same["swiglu_alpha"] = 0.0 if self.swiglu_alpha == 1 else ctypes.c_float(self.swiglu_alpha).value
        for name, value in same.items():
            object.__setattr__(self, name, value)

    @property
    def logits(self) -> int:
        """Columns of the router logits."""
        return self.experts + self.zero_experts

    @property
    def n_blocks(self) -> int:
        """128-feature blocks of the unsharded matrix that this rank's features touch."""
        return (self.intermediate_offset + self.intermediate + 127) // 128

    @property
    def k_blocks(self) -> int:
        """128-column blocks of hidden."""
        return (self.hidden + 127) // 128

    @property
    def shared_count(self) -> int:
        """Always-active experts in the call; their weights lie behind the routed ones."""
        return self.shared_experts % SHARED_GATED

    @property
    def shared_gated(self) -> bool:
        """Does a call pass gates for the shared experts?"""
        return self.shared_experts >= SHARED_GATED

    def _as_c(self) -> _abi.CProblem:
        c = _abi.CProblem()
        c.struct_size = ctypes.sizeof(c)
        for field in dataclasses.fields(self):
            setattr(c, field.name, getattr(self, field.name))
        return c

    @classmethod
    def _from_c(cls, c: _abi.CProblem) -> "Problem":
        return cls(**{field.name: getattr(c, field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of a package: a kernel for a problem, a GPU and an interval of token counts. Times are 0 if they were only predicted."""

    shape_name: str
    device_name: str
    schedule: str
    tokens_min: int
    tokens_max: int
    min_driver: int  # CUDA version, 12080 = 12.8
    problem: Problem
    routed_scaling: float
    us: float
    floor_us: float


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of one layer (struct mf_weights): device addresses, strides in elements, 0 = dense."""

    w13: int
    s13: int
    w2: int
    s2: int
    bias: int = 0
    w13_row_stride: int = 0
    w2_row_stride: int = 0
    routed_scaling: float = 1.0


class _Handle:
    """A C object and the count of its users: its Python owner and the handles made from it. The last one ends it, then releases the parent."""

    def __init__(self, pointer: int, destroy: Callable[[int], None], parent: Optional["_Handle"] = None) -> None:
        self.pointer = pointer
        self._destroy = destroy
        self._parent = parent
        self._users = 1
        self._lock = threading.RLock()  # a collection may end another handle within this one's calls

    def retain(self) -> "_Handle":
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._destroy(self.pointer)
            if self._parent is not None:
                self._parent.release()


class _Owner:
    """Base of Package, Op and Layer: owns one use of a handle until close()."""

    _handle: Optional[_Handle] = None

    def _pointer(self) -> int:
        handle = self._handle
        if handle is None:
            raise UsageError(f"this {type(self).__name__} is closed: keep it open as long as it is used")
        return handle.pointer

    def _child(self, pointer: int, destroy: Callable[[int], None]) -> _Handle:
        assert self._handle is not None
        return _Handle(pointer, destroy, self._handle.retain())

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Ends the object; further calls of close do nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.release()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _check(status: int, doing: str) -> None:
    if status != Status.OK:
        raise _failure(status, doing)


def _failure(status: int, doing: str) -> Exception:
    lib = _abi.library()
    return error_of(status, lib.mf_status_string(status).decode(), lib.mf_status_name(status).decode(), doing)


class Layer(_Owner):
    """One layer's weights, bound to an op. forward() may be called from several threads, each concurrent stream with its own workspace."""

    def __init__(self, op: "Op", weights: Weights) -> None:
        lib = _abi.library()
        parent = op._pointer()
        self.op = op
        self.weights = weights
        c = _abi.CWeights()
        c.struct_size = ctypes.sizeof(c)
        for field in dataclasses.fields(weights):
            setattr(c, field.name, getattr(weights, field.name))
        out = ctypes.c_void_p()
        _check(lib.mf_layer_bind(parent, ctypes.byref(c), ctypes.byref(out)), "bind of a layer's weights")
        assert out.value is not None
        self._handle = op._child(out.value, lib.mf_layer_destroy)
        self._forward = lib.mf_moe_forward

    def forward(
        self, *, tokens: int, x: int, out: int, workspace: int, logits: int = 0, ids: int = 0, weights: int = 0, stream: int = 0, x_stride: int = 0,
        logits_stride: int = 0, out_stride: int = 0, ids_stride: int = 0, weights_stride: int = 0, shared_gate: int = 0, shared_gate_stride: int = 0,
    ) -> None:
        """Launches the layer on `stream`: no allocation, no synchronisation, capturable into a CUDA graph. Addresses are of device memory.

        A problem with score GIVEN takes ids (i32) and weights (f32), all others take logits; gated shared experts take shared_gate. Zero tokens launch
        nothing.
        Raises MissTokens above the op's max_tokens; on any exception nothing was launched.
        """
        call = _abi.CCall(
            ctypes.sizeof(_abi.CCall), tokens, x, logits, out, workspace, x_stride, logits_stride, out_stride, ids, weights, ids_stride, weights_stride,
            shared_gate, shared_gate_stride,
        )
        status = self._forward(self._pointer(), ctypes.byref(call), stream)
        if status != Status.OK:
            raise _failure(status, f"forward of {tokens} tokens")


class Op(_Owner):
    """The kernels that serve a problem for 1..max_tokens tokens on one GPU."""

    def __init__(self, package: "Package", problem: Problem, device: int, max_tokens: int) -> None:
        lib = _abi.library()
        parent = package._pointer()
        self.package = package
        self.problem = problem
        self.device = device
        out = ctypes.c_void_p()
        c = problem._as_c()
        doing = f"op for device {device}, 1 to {max_tokens} tokens"
        _check(lib.mf_op_create(parent, ctypes.byref(c), device, max_tokens, ctypes.byref(out)), doing)
        assert out.value is not None
        self._handle = package._child(out.value, lib.mf_op_destroy)

    @property
    def max_tokens(self) -> int:
        return int(_abi.library().mf_op_max_tokens(self._pointer()))

    @property
    def workspace_size(self) -> int:
        """Bytes of workspace, 256-byte aligned, one for each stream on which calls may run at the same time. Layers of one op may share it."""
        return int(_abi.library().mf_op_workspace_size(self._pointer()))

    def init_workspace(self, workspace: int, stream: int = 0) -> None:
        """Prepares a workspace in stream order: once, and again after a launch that was aborted."""
        _check(_abi.library().mf_workspace_init(self._pointer(), workspace, stream), "initialisation of a workspace")

    def bind(self, weights: Weights) -> Layer:
        """Encodes the launch parameters of one layer. The weights' memory must stay where it is while the layer exists."""
        return Layer(self, weights)


class Package(_Owner):
    """An open package file."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        lib = _abi.library()
        self.path = os.fspath(path)
        out = ctypes.c_void_p()
        _check(lib.mf_package_open(os.fsencode(self.path), ctypes.byref(out)), self.path)
        assert out.value is not None
        self._handle = _Handle(out.value, lib.mf_package_close)

    @property
    def manifest(self) -> str:
        """The JSON manifest."""
        text: bytes = _abi.library().mf_package_manifest(self._pointer())
        return text.decode()

    def entries(self) -> list[Entry]:
        """What the package offers."""
        return list(self._entries())

    def _entries(self) -> Iterator[Entry]:
        lib = _abi.library()
        c = _abi.CPackageEntry()
        index = 0
        while True:
            c.struct_size = ctypes.sizeof(c)
            status = lib.mf_package_entry_at(self._pointer(), index, ctypes.byref(c))
            if status == Status.ERR_NOT_FOUND:
                return
            _check(status, f"entry {index}")
            yield Entry(
                c.shape_name.decode(), c.device_name.decode(), c.schedule.decode(), c.tokens_min, c.tokens_max, c.min_driver, Problem._from_c(c.problem),
                c.routed_scaling, c.us, c.floor_us,
            )
            index += 1

    def problem(self, shape_name: Optional[str] = None) -> Problem:
        """The problem of a shape name, or of the only shape in the package."""
        found = {e.problem: e.shape_name for e in self._entries() if shape_name in (None, e.shape_name)}
        if len(found) == 1:
            return next(iter(found))
        if not found:
            raise NotFound(f"{self.path}: no shape {shape_name}; there are {sorted({e.shape_name for e in self._entries()})}")
        raise UsageError(f"{self.path}: several problems, name one of {sorted(set(found.values()))}")

    def op(self, problem: Problem, device: int = 0, max_tokens: Optional[int] = None) -> Op:
        """Loads the kernels that serve `problem` on CUDA device `device`; without max_tokens for as many tokens as the package has entries for.

        Raises MissShape, MissDevice, MissTokens, MissDriver or MissSms if the package does not serve it.
        """
        if max_tokens is None:
            max_tokens = self.max_tokens(problem)
        return Op(self, problem, device, max_tokens)

    def max_tokens(self, problem: Problem) -> int:
        """The largest count such that every count from 1 up to it has an entry for `problem`, on whatever GPU."""
        covered = {tokens for e in self._entries() if e.problem == problem for tokens in range(e.tokens_min, e.tokens_max + 1)}
        if 1 not in covered:
            raise _failure(Status.MISS_SHAPE if not covered else Status.MISS_TOKENS, self.path)
        tokens = 1
        while tokens + 1 in covered:
            tokens += 1
        return tokens


def load(path: Union[str, "os.PathLike[str]"]) -> Package:
    """Opens a package file; it is checked whole, so damage shows here."""
    return Package(path)


__all__ = ["ActScale", "Dtype", "Entry", "Layer", "Op", "Package", "Problem", "Score", "Weights", "load"]
