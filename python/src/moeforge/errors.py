"""Exceptions: one class for each status of libmoeforge that a caller may want to tell apart.

Everything derives from MoeforgeError. A Miss says that the package does not serve the request: use your own kernel for it. Everything else is a fault.
"""

from __future__ import annotations

import enum
from typing import Optional


class Status(enum.IntEnum):
    """enum mf_status. Values are part of the ABI and never change."""

    OK = 0
    REJECTED = 1
    ERR_USAGE = 2
    ERR_SPEC = 3
    ERR_UNSUPPORTED = 4
    ERR_IO = 5
    ERR_STORE = 6
    ERR_TOOLKIT = 7
    ERR_NO_DEVICE = 8
    ERR_DEVICE = 9
    ERR_COMPILE = 10
    ERR_CHECK = 11
    ERR_TIMEOUT = 12
    ERR_WORKER = 13
    ERR_NOT_FOUND = 14
    ERR_NOMEM = 15
    ERR_INTERNAL = 16
    ERR_INTERRUPTED = 17
    ERR_CORRUPT = 32
    ERR_NEWER_FORMAT = 33
    MISS_SHAPE = 34
    MISS_DEVICE = 35
    MISS_TOKENS = 36
    MISS_DRIVER = 37
    MISS_SMS = 38
    MISS_LAYOUT = 39


class MoeforgeError(Exception):
    """Base of all exceptions of this package. `status` is the library's status, None where the library was not asked."""

    status: Optional[int] = None
    advice = ""


class LibraryNotFound(MoeforgeError, ImportError):
    """libmoeforge.so is not installed or does not load."""


class Miss(MoeforgeError):
    """The package does not serve this request: fall back to your own kernel."""


class MissShape(Miss):
    """No entry for this problem."""

    advice = "use your own kernel; to serve this shape, tune it and export it again"


class MissDevice(Miss):
    """Entries exist, but for other GPUs."""

    advice = "use your own kernel; to serve this GPU, tune on it"


class MissTokens(Miss):
    """The token count is outside the tuned interval."""

    advice = "use your own kernel for these token counts, or create the op with a smaller max_tokens"


class MissDriver(Miss):
    """The driver is older than the kernel needs."""

    advice = "use your own kernel, or update the NVIDIA driver"


class MissSms(Miss):
    """Too few multiprocessors to keep the kernel resident (MIG, MPS limits, another SKU of the same name)."""

    advice = "use your own kernel"


class MissLayout(Miss):
    """Strides or alignment that the kernel cannot read."""

    advice = "use your own kernel, or align pointers and rows to 16 bytes and let the experts follow each other without a gap"


class UsageError(MoeforgeError, ValueError):
    """A wrong argument."""

    advice = "check pointers, strides, alignment of the workspace (256 bytes), and that x and out do not overlap"


class PackageIOError(MoeforgeError, OSError):
    """The package file cannot be read."""

    advice = "check the path"


class CorruptPackage(MoeforgeError):
    """The package file is damaged."""

    advice = "copy the file again; `moeforge verify FILE` says where it is damaged"


class NewerFormat(MoeforgeError):
    """The package was made by a newer version."""

    advice = "update libmoeforge"


class NoDevice(MoeforgeError):
    """No driver, no GPU, or no such device number."""

    advice = "use your own path; install the NVIDIA driver, or name its library in MOEFORGE_LIBCUDA"


class DeviceError(MoeforgeError):
    """The GPU or its driver reported a failure, maybe of an earlier, asynchronous call."""

    advice = "treat it as any CUDA error; initialise the workspace again if a launch was aborted"


class OutOfMemory(MoeforgeError, MemoryError):
    """Out of host or device memory."""

    advice = "free memory on the host or the GPU"


class NotFound(MoeforgeError, LookupError):
    """No such entry."""


# What each status raises; a status that is not listed raises MoeforgeError itself.
CLASSES: dict[int, type[MoeforgeError]] = {
    Status.MISS_SHAPE: MissShape,
    Status.MISS_DEVICE: MissDevice,
    Status.MISS_TOKENS: MissTokens,
    Status.MISS_DRIVER: MissDriver,
    Status.MISS_SMS: MissSms,
    Status.MISS_LAYOUT: MissLayout,
    Status.ERR_USAGE: UsageError,
    Status.ERR_IO: PackageIOError,
    Status.ERR_CORRUPT: CorruptPackage,
    Status.ERR_NEWER_FORMAT: NewerFormat,
    Status.ERR_NO_DEVICE: NoDevice,
    Status.ERR_DEVICE: DeviceError,
    Status.ERR_NOMEM: OutOfMemory,
    Status.ERR_NOT_FOUND: NotFound,
}


def error_of(status: int, message: str, name: str, doing: str) -> MoeforgeError:
    """The exception for a status: what was done, the library's message and its identifier, and what to do next."""
    cls = CLASSES.get(status, MoeforgeError)
    text = f"{doing}: {message} ({name})"
    error = cls(f"{text}: {cls.advice}" if cls.advice else text)
    error.status = status
    return error
