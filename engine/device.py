"""DeviceManager: which device, dtype, attention backend and block size an engine uses, and why.

Every choice is logged with its reason, so that nobody has to guess what "auto" did. What the machine has is
asked through a Probe, which tests replace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import host_memory
from engine.config import EngineConfig
from models import kernels
from models.layers import flash_attn

logger = logging.getLogger("pageturn.engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_POOL_LIMIT = 2 * 2**30
_BLOCK_SIZES = {
    "sdpa": 16,
    "triton": 32,  # of 16 a long prompt costs the host twice as much
    "flash_attn": flash_attn.BLOCK_MULTIPLE,
}  # tokens; what each attention backend prefers
_BF16_CAPABILITY = (8, 0)  # Ampere, the first CUDA architecture with bfloat16 units


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What was chosen. reasons holds one line per choice. block_size is in tokens."""

    device: torch.device
    dtype: torch.dtype
    attention_backend: str
    block_size: int
    reasons: tuple[str, ...]


class Probe:
    """What this machine has. Memory figures are in bytes. card: the index of the CUDA card that is asked about."""

    def __init__(self, card: int = 0) -> None:
        self.card = card

    def num_cuda_devices(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def cuda_name(self) -> str:
        return torch.cuda.get_device_name(self.card)

    def cuda_capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.card)

    def cuda_memory(self) -> tuple[int, int]:
        """(free, total) of the card, other processes' use counted."""
        return torch.cuda.mem_get_info(self.card)

    def peak_beyond(self, run: Callable[[], None]) -> int:
        """Bytes that torch holds of the card at the height of run(), beyond what it holds afterwards. What run() leaves
        outside of torch's allocator (kernels' code, libraries' workspaces) is in use from then on."""
        torch.cuda.synchronize(self.card)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.card)
        run()
        torch.cuda.synchronize(self.card)
        peak = torch.cuda.max_memory_reserved(self.card)
        torch.cuda.empty_cache()
        return peak - torch.cuda.memory_reserved(self.card)

    def why_no_cuda(self) -> str:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"this torch ({torch.__version__}) is built without CUDA"
        return f"torch {torch.__version__} finds no usable CUDA card"

    def why_no_triton(self) -> str | None:
        """What keeps the Triton kernels from running on the card; None where they run."""
        return kernels.why_unusable("cuda")

    def why_no_flash_attn(self) -> str | None:
        """What keeps the package flash_attn from being used; None where nothing does."""
        return flash_attn.why_unusable()

    def cpu_bf16(self) -> str | None:
        """The instructions with which this CPU multiplies bfloat16 natively, None where it does not.

        Read from the kernel rather than from torch, whose checks also say yes where bfloat16 is emulated.
        """
        return native_bf16(Path("/proc/cpuinfo"))

    def host_memory(self) -> host_memory.Room:
        return host_memory.free_to_this_process()


def native_bf16(cpuinfo: Path) -> str | None:
    """The name of the CPU's bfloat16 instructions: AMX and AVX-512 on x86, "bf16" on Arm."""
    try:
        text = cpuinfo.read_text()
    except OSError:  # no Linux: torch's fast bfloat16 paths are not known to exist there
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return next((f for f in ("amx_bf16", "avx512_bf16", "bf16") if f in flags), None)
    return None


class DeviceManager:
    """Turns an EngineConfig into a DevicePlan, and a plan into a memory budget.

    An explicit setting is honoured or refused with a ValueError of one line; it is never replaced.
    """

    def __init__(self, config: EngineConfig, probe: Probe | None = None) -> None:
        self._config = config
        self._probe = probe or Probe()
        self._reasons: list[str] = []

    def resolve(self) -> DevicePlan:
        """Choose, and log one line per choice to "pageturn.engine"."""
        self._reasons = []
        device = self._device()
        dtype = self._dtype(device)
        backend = self._attention_backend(device, dtype)
        block_size = self._block_size(backend)
        for reason in self._reasons:
            logger.info("%s", reason)
        return DevicePlan(device, dtype, backend, block_size, tuple(self._reasons))

    def kv_budget_bytes(self, plan: DevicePlan, reserved: int = 0) -> int:
        """Bytes that the KV pool may take now, the weights being loaded; logged with its reason.

        reserved: bytes that steps will need beyond what is in use now. CPU: the smaller of 2 GiB and a
        quarter of the memory free to this process, of which each rank takes its share. CUDA: gpu_memory_utilization
        of the card less what is in use. Raises ValueError where nothing is left.
        """
        if plan.device.type == "cuda":
            free, total = self._probe.cuda_memory()
            share = self._config.gpu_memory_utilization
            budget = int(total * share) - (total - free) - reserved
            reason = f"{share:.0%} of {_gib(total)}, less {_gib(total - free)} in use and {_gib(reserved)} reserved"
            advice = "free memory on the card, raise gpu_memory_utilization or use a smaller model"
        else:
            room = self._probe.host_memory()
            quarter = (room.free - reserved) // 4
            budget = min(_CPU_POOL_LIMIT, quarter) // self._config.tensor_parallel_size
            bound = "limit on a CPU" if quarter >= _CPU_POOL_LIMIT else f"a quarter of {_gib(room.free)} ({room.limit})"
            reason = f"{bound}; set num_kvcache_blocks for more"
            advice = "free memory, raise the limit or set num_kvcache_blocks"
        if budget <= 0:
            raise ValueError(f"no memory is left for the KV cache ({reason}): {advice}")
        logger.info("KV cache: up to %s (%s)", _gib(budget), reason)
        return budget

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """What run(), the worst step on a CUDA card, needs for a while: to be reserved beside the KV pool.

        Raises ValueError where the card has not even that.
        """
        try:
            peak = self._probe.peak_beyond(run)
        except torch.OutOfMemoryError:
            free, total = self._probe.cuda_memory()
            raise ValueError(
                f"the largest step does not fit on the card beside the model ({_gib(free)} of {_gib(total)} are free): "
                "free memory on the card, lower max_num_batched_tokens or max_num_seqs, or use a smaller model"
            ) from None
        logger.info("largest step: needs %s beside the model", _gib(peak))
        return peak

    def free_bytes(self, plan: DevicePlan) -> int:
        """Bytes of memory that are free now where the KV pool goes; on a CPU, this rank's share of them."""
        if plan.device.type == "cuda":
            return self._probe.cuda_memory()[0]
        return self._probe.host_memory().free // self._config.tensor_parallel_size

    def _device(self) -> torch.device:
        asked, cards = self._config.device, self._probe.num_cuda_devices()
        if asked == "cuda" and not cards:
            reason = self._probe.why_no_cuda()
            raise ValueError(f"device='cuda' was asked for, but {reason}; use device='cpu' or 'auto'")
        ranks = self._config.tensor_parallel_size
        if asked != "cpu" and 0 < cards < ranks:
            raise ValueError(
                f"tensor_parallel_size={ranks} needs {ranks} CUDA cards, this machine has {cards}; "
                f"use at most {cards}, or device='cpu'"
            )
        if asked == "cpu":
            self._because("device: cpu (asked for)")
        elif cards:
            why = "asked for" if asked == "cuda" else "auto: a CUDA card is there"
            which = "cuda:0" if ranks == 1 else f"cuda:0 to cuda:{ranks - 1}"
            self._because(f"device: {which}, {self._probe.cuda_name()} ({why})")
            return torch.device("cuda", 0)
        else:
            self._because(f"device: cpu (auto: {self._probe.why_no_cuda()})")
        return torch.device("cpu")

    def _dtype(self, device: torch.device) -> torch.dtype:
        asked = self._config.dtype
        if device.type == "cuda":
            capability = self._probe.cuda_capability()
            native = capability >= _BF16_CAPABILITY
            where = "compute capability {}.{}".format(*capability)
            if asked == "bfloat16" and not native:
                raise ValueError(
                    f"dtype='bfloat16' needs a card of compute capability 8.0 or more, {self._probe.cuda_name()} has "
                    f"{capability[0]}.{capability[1]}; use dtype='float16' or 'auto'"
                )
            auto, why = ("bfloat16", f"{where} has it") if native else ("float16", f"{where} has no bfloat16")
        else:
            instructions = self._probe.cpu_bf16()
            auto, why = ("float32", "this CPU has no bfloat16 instructions")
            if instructions:
                auto, why = "bfloat16", f"this CPU has {instructions}"
            if asked == "float16" or (asked == "bfloat16" and not instructions):
                logger.warning("dtype %s is slow on this CPU; 'auto' would choose %s (%s)", asked, auto, why)
        self._because(f"dtype: {auto} (auto: {why})" if asked == "auto" else f"dtype: {asked} (asked for)")
        return _DTYPES[auto if asked == "auto" else asked]

    def _attention_backend(self, device: torch.device, dtype: torch.dtype) -> str:
        asked = self._config.attention_backend
        if asked == "sdpa":
            self._because("attention: sdpa (asked for)")
            return asked
        if device.type != "cuda":
            if asked != "auto":
                raise ValueError(
                    f"attention_backend={asked!r} needs a CUDA card, but the device is a CPU; use 'sdpa' or 'auto'"
                )
            self._because("attention: sdpa (auto: the one for a CPU)")
            return "sdpa"
        if asked == "flash_attn":
            if why := self._why_no_flash_attn(dtype):
                raise ValueError(f"attention_backend='flash_attn' was asked for, but {why}; use 'triton' or 'auto'")
            self._because("attention: flash_attn (asked for; untested on real hardware)")
            return asked
        missing = self._probe.why_no_triton()
        if missing and asked == "triton":
            raise ValueError(f"attention_backend='triton' was asked for, but {missing}; use 'sdpa' or 'auto'")
        if missing:
            self._because(f"attention: sdpa (auto: {missing})")
            return "sdpa"
        why = "asked for" if asked == "triton" else "auto: its kernels run on this card"
        self._because(f"attention: triton ({why})")
        return "triton"

    def _why_no_flash_attn(self, dtype: torch.dtype) -> str | None:
        if dtype not in flash_attn.DTYPES:
            return f"it computes in float16 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
        capability = self._probe.cuda_capability()
        if capability < flash_attn.CAPABILITY:
            return "it needs a card of compute capability {}.{}, this one has {}.{}".format(
                *flash_attn.CAPABILITY, *capability
            )
        return self._probe.why_no_flash_attn()

    def _block_size(self, backend: str) -> int:
        asked = self._config.kvcache_block_size
        if asked is not None:
            if backend == "flash_attn" and asked % flash_attn.BLOCK_MULTIPLE:
                raise ValueError(
                    f"kvcache_block_size={asked} does not fit attention_backend='flash_attn', which reads blocks of a "
                    f"multiple of {flash_attn.BLOCK_MULTIPLE} tokens; leave it unset or use another backend"
                )
            self._because(f"KV block size: {asked} tokens (asked for)")
            return asked
        size = _BLOCK_SIZES[backend]
        self._because(f"KV block size: {size} tokens (what {backend} prefers)")
        return size

    def _because(self, reason: str) -> None:
        self._reasons.append(reason)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
