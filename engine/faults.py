"""What can go wrong in a step, and how far it reaches: one request, the memory, the engine, or the whole process."""

from __future__ import annotations

# What torch's allocators say where they raise a plain RuntimeError: the CPU's ("DefaultCPUAllocator: can't allocate
# memory: you tried to allocate N bytes", on Windows "not enough memory"), the driver's ("CUDA error: out of memory")
# and cuBLAS's, whose workspace is memory too.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class EngineBroken(RuntimeError):
    """Steps fail whatever is in them: no request can be served. __cause__ is what the runner raised."""


class DeviceLost(EngineBroken):
    """The device answers nothing any more (a sticky CUDA error): only a new process can use it again."""


class StepStuck(EngineBroken):
    """A step went far beyond its deadline; its thread is inside native code, which nothing in a process can end."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed for want of memory, on the host or on the device."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def root_cause(error: BaseException) -> str:
    """One line for whoever submitted a request: the class and the first line of what was raised first.

    torch appends advice on debugging and C++ frames to CUDA errors; the log has them.
    """
    while isinstance(error, (EngineBroken,)) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return f"{name}: {text}" if text else name
