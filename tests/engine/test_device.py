"""What "auto" chooses on machines of every kind, and what an explicit setting does where it cannot be had."""

from __future__ import annotations

import logging

import pytest
import torch

from engine import loading
from engine.config import EngineConfig
from engine.device import DeviceManager, Probe, native_bf16
from engine.host_memory import Room, free_to_this_process
from models import catalog
from models.catalog import HUB_DEFAULT

GIB = 2**30
ROOMY = Room(16 * GIB, "MemAvailable")


class Machine(Probe):
    """A machine made up: `capability` None is one without a card."""

    def __init__(
        self, capability=None, cpu_bf16=None, card=(70 * GIB, 80 * GIB), host=ROOMY, no_triton=None, no_flash_attn=None
    ):
        self._capability, self._cpu_bf16, self._card, self._host = capability, cpu_bf16, card, host
        self._no_triton, self._no_flash_attn = no_triton, no_flash_attn

    def num_cuda_devices(self):
        return 0 if self._capability is None else 1

    def cuda_name(self):
        return "Testcard 9000"

    def cuda_capability(self):
        assert self._capability is not None, "there is no card to ask"
        return self._capability

    def cuda_memory(self):
        assert self._capability is not None, "there is no card to ask"
        return self._card

    def why_no_cuda(self):
        return "torch finds no usable CUDA card"

    def why_no_triton(self):
        assert self._capability is not None, "there is no card to ask"
        return self._no_triton

    def why_no_flash_attn(self):
        assert self._capability is not None, "there is no card to ask"
        return self._no_flash_attn

    def cpu_bf16(self):
        return self._cpu_bf16

    def host_memory(self):
        return self._host


LAPTOP, SERVER = Machine(), Machine(cpu_bf16="avx512_bf16")
TURING = Machine(capability=(7, 5), no_triton="the Triton kernels want compute capability 8.0, this card has 7.5")
HOPPER = Machine(capability=(9, 0))
NO_COMPILER = Machine(capability=(9, 0), no_triton="triton fails on this card: RuntimeError: Failed to find C compiler")


@pytest.mark.parametrize(
    ("machine", "device", "dtype", "backend", "block_size"),
    [
        (LAPTOP, "cpu", torch.float32, "sdpa", 16),
        (SERVER, "cpu", torch.bfloat16, "sdpa", 16),
        (TURING, "cuda:0", torch.float16, "sdpa", 16),
        (HOPPER, "cuda:0", torch.bfloat16, "triton", 32),
    ],
)
def test_auto_takes_the_card_if_there_is_one_and_the_fastest_dtype_that_is_native(
    machine, device, dtype, backend, block_size
):
    plan = DeviceManager(EngineConfig(), machine).resolve()
    assert (str(plan.device), plan.dtype) == (device, dtype)
    assert (plan.attention_backend, plan.block_size) == (backend, block_size)


@pytest.mark.parametrize("machine", [LAPTOP, SERVER, TURING, HOPPER, NO_COMPILER])
def test_every_choice_is_logged_with_its_reason(machine, caplog):
    with caplog.at_level(logging.INFO, logger="pageturn.engine"):
        plan = DeviceManager(EngineConfig(), machine).resolve()
    assert [line.split(":")[0] for line in plan.reasons] == ["device", "dtype", "attention", "KV block size"]
    assert caplog.messages == list(plan.reasons)
    assert all("(" in line for line in plan.reasons)


def test_resolving_twice_gives_the_reasons_once():
    manager = DeviceManager(EngineConfig(), LAPTOP)
    assert manager.resolve() == manager.resolve()


@pytest.mark.parametrize("machine", [LAPTOP, SERVER, TURING, HOPPER])
def test_explicit_settings_are_honoured(machine):
    config = EngineConfig(device="cpu", dtype="float32", attention_backend="sdpa", kvcache_block_size=32)
    plan = DeviceManager(config, machine).resolve()
    assert (plan.device.type, plan.dtype, plan.attention_backend, plan.block_size) == ("cpu", torch.float32, "sdpa", 32)
    assert all("asked for" in line for line in plan.reasons)


def test_a_card_whose_kernels_do_not_run_serves_with_sdpa_and_says_why():
    plan = DeviceManager(EngineConfig(), NO_COMPILER).resolve()
    assert plan.attention_backend == "sdpa"
    assert "attention: sdpa (auto: triton fails on this card: RuntimeError: Failed to find C compiler)" in plan.reasons


def test_triton_that_was_asked_for_is_used_or_refused_in_one_line_that_says_what_to_do():
    config = EngineConfig(attention_backend="triton")
    assert DeviceManager(config, HOPPER).resolve().attention_backend == "triton"
    with pytest.raises(ValueError, match=r"^attention_backend='triton' needs a CUDA card.*use 'sdpa' or 'auto'$"):
        DeviceManager(config, LAPTOP).resolve()
    with pytest.raises(ValueError, match=r"^attention_backend='triton' .*Failed to find C compiler; use 'sdpa' or"):
        DeviceManager(config, NO_COMPILER).resolve()


def test_flash_attn_is_used_only_where_it_was_asked_for_and_says_that_it_is_untested():
    assert DeviceManager(EngineConfig(), HOPPER).resolve().attention_backend == "triton"
    assert DeviceManager(EngineConfig(), NO_COMPILER).resolve().attention_backend == "sdpa"
    plan = DeviceManager(EngineConfig(attention_backend="flash_attn"), HOPPER).resolve()
    assert (plan.attention_backend, plan.block_size) == ("flash_attn", 256)
    assert "attention: flash_attn (asked for; untested on real hardware)" in plan.reasons


@pytest.mark.parametrize(
    ("machine", "settings", "reason"),
    [
        (LAPTOP, {}, "needs a CUDA card, but the device is a CPU"),
        (TURING, {}, r"needs a card of compute capability 8\.0, this one has 7\.5; use 'triton'"),
        (HOPPER, {"dtype": "float32"}, "computes in float16 or bfloat16, not in float32; use 'triton'"),
        (
            Machine((9, 0), no_flash_attn="the package flash_attn is not installed"),
            {},
            "is not installed; use 'triton'",
        ),
        (HOPPER, {"kvcache_block_size": 16}, "kvcache_block_size=16 does not fit .* multiple of 256"),
    ],
)
def test_flash_attn_that_cannot_be_used_is_refused_in_one_line_with_the_reason(machine, settings, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        DeviceManager(EngineConfig(attention_backend="flash_attn", **settings), machine).resolve()
    assert "\n" not in str(caught.value)


def test_flash_attn_takes_blocks_of_512_tokens_too():
    config = EngineConfig(attention_backend="flash_attn", kvcache_block_size=512)
    assert DeviceManager(config, HOPPER).resolve().block_size == 512


def test_cuda_without_a_card_is_refused_in_one_line_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"^device='cuda' was asked for, but .*; use device='cpu' or 'auto'$"):
        DeviceManager(EngineConfig(device="cuda"), LAPTOP).resolve()


def test_cuda_on_this_machine_is_used_or_refused():
    manager = DeviceManager(EngineConfig(device="cuda"))
    if torch.cuda.is_available():
        assert manager.resolve().device.type == "cuda"
    else:
        with pytest.raises(ValueError, match="torch"):
            manager.resolve()


def test_bfloat16_on_a_card_without_it_is_refused_with_both_capabilities():
    with pytest.raises(ValueError, match=r"8\.0 or more, Testcard 9000 has 7\.5; use dtype='float16'"):
        DeviceManager(EngineConfig(dtype="bfloat16"), TURING).resolve()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_that_this_cpu_emulates_is_used_with_a_warning(dtype, caplog):
    plan = DeviceManager(EngineConfig(dtype=dtype), LAPTOP).resolve()
    assert plan.dtype == getattr(torch, dtype)
    assert any("slow on this CPU" in message for message in caplog.messages)


def test_what_this_machine_has_can_be_asked():
    plan = DeviceManager(EngineConfig(device="cpu")).resolve()
    assert DeviceManager(EngineConfig(device="cpu")).kv_budget_bytes(plan) > 0
    torch.zeros(2, 2, dtype=plan.dtype) @ torch.zeros(2, 2, dtype=plan.dtype)


@pytest.mark.parametrize(
    ("cpuinfo", "found"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16\n", "amx_bf16"),
        ("processor : 0\nflags : fpu avx2 avx512_bf16\n\nprocessor : 1\n", "avx512_bf16"),
        ("flags : fpu avx2 avx512f avx512bw\n", None),
        ("processor : 0\nFeatures : fp asimd i8mm bf16 sve\n", "bf16"),
        ("model name : a CPU with bf16 in its name\nFeatures : fp asimd\n", None),
        ("", None),
        (None, None),
    ],
)
def test_native_bfloat16_is_read_from_the_cpus_flags(tmp_path, cpuinfo, found):
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    assert native_bf16(path) == found


# Memory ----------------------------------------------------------------------------------------------------


def budget(machine: Machine, reserved: int = 0, **settings: object) -> int:
    manager = DeviceManager(EngineConfig(**settings), machine)
    return manager.kv_budget_bytes(manager.resolve(), reserved)


@pytest.mark.parametrize(("free", "pool"), [(4 * GIB, GIB), (8 * GIB, 2 * GIB), (64 * GIB, 2 * GIB), (1000, 250)])
def test_a_cpu_pool_takes_a_quarter_of_the_free_memory_and_at_most_2_gib(free, pool):
    assert budget(Machine(host=Room(free, "MemAvailable"))) == pool


def test_memory_reserved_for_activations_is_not_given_to_a_cpu_pool():
    assert budget(Machine(host=Room(4 * GIB, "MemAvailable")), reserved=GIB) == 3 * GIB // 4


def test_a_gpu_pool_takes_its_share_of_the_card_less_what_is_in_use():
    card = Machine(capability=(9, 0), card=(70 * GIB, 80 * GIB))
    assert budget(card, gpu_memory_utilization=0.5) == 30 * GIB
    assert budget(card, reserved=2 * GIB, gpu_memory_utilization=0.5) == 28 * GIB
    assert budget(card, gpu_memory_utilization=1.0) == 70 * GIB


def test_a_full_card_is_refused_with_the_numbers():
    full = Machine(capability=(9, 0), card=(1 * GIB, 80 * GIB))
    with pytest.raises(ValueError, match=r"90% of 80\.00 GiB, less 79\.00 GiB in use.*gpu_memory_utilization"):
        budget(full)


def test_a_full_host_is_refused_with_the_limit_that_is_reached():
    with pytest.raises(ValueError, match=r"cgroup memory\.max.*num_kvcache_blocks"):
        budget(Machine(host=Room(0, "cgroup memory.max")))


def test_the_budget_is_logged_with_what_bounds_it(caplog):
    with caplog.at_level(logging.INFO, logger="pageturn.engine"):
        budget(Machine(host=Room(4 * GIB, "cgroup memory.max")))
    assert "KV cache: up to 1.00 GiB (a quarter of 4.00 GiB (cgroup memory.max)" in caplog.messages[-1]


class Files:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, root, available_kib=8 * 2**20):
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: 99 kB\nMemFree: 5 kB\nMemAvailable:  {available_kib} kB\n", root)
        self.write("proc/self/status", "Name:\tpython\nVmSize:\t 1048576 kB\n", root)

    def write(self, path, text, root=None):
        target = (root or self.proc.parent) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(str(text))

    def room(self, address_space=None):
        return free_to_this_process(self.proc, self.cgroups, address_space)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.host_memory._address_space_limit", lambda: None)
    return Files(tmp_path)


def test_without_limits_what_the_machine_has_available_is_free(files):
    assert files.room() == (8 * GIB, "MemAvailable")


def test_a_container_limit_below_the_machines_memory_counts(files):
    files.write("proc/self/cgroup", "0::/\n")
    files.write("cgroup/memory.max", 3 * GIB)
    files.write("cgroup/memory.current", GIB)
    assert files.room() == (2 * GIB, "cgroup memory.max")


def test_page_cache_that_the_kernel_would_drop_is_not_counted_as_used(files):
    files.write("proc/self/cgroup", "0::/\n")
    files.write("cgroup/memory.max", 3 * GIB)
    files.write("cgroup/memory.current", 3 * GIB)
    files.write("cgroup/memory.stat", f"anon 5\nfile {GIB}\ninactive_file {GIB // 2}\n")
    assert files.room() == (GIB // 2, "cgroup memory.max")


def test_the_tightest_group_on_the_way_up_counts(files):
    files.write("proc/self/cgroup", "0::/user.slice/session.scope\n")
    files.write("cgroup/user.slice/session.scope/memory.max", "max\n")
    files.write("cgroup/user.slice/session.scope/memory.current", 5)
    files.write("cgroup/user.slice/memory.max", f"{GIB}\n")
    files.write("cgroup/user.slice/memory.current", f"{GIB // 4}\n")
    assert files.room() == (3 * GIB // 4, "cgroup memory.max")


def test_a_group_path_that_leads_outside_the_mounted_tree_reads_the_container_s_own_root(files):
    files.write("proc/self/cgroup", "0::/../../outside\n")
    files.write("cgroup/memory.max", GIB)
    files.write("cgroup/memory.current", 0)
    assert files.room() == (GIB, "cgroup memory.max")


def test_version_1_groups_are_read_and_their_no_limit_is_none(files):
    files.write("proc/self/cgroup", "11:cpu,cpuacct:/x\n7:memory:/docker/abc\n")
    files.write("cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    files.write("cgroup/memory/memory.usage_in_bytes", 12345)
    assert files.room().limit == "MemAvailable"
    files.write("cgroup/memory/docker/abc/memory.limit_in_bytes", 2 * GIB)
    files.write("cgroup/memory/docker/abc/memory.usage_in_bytes", GIB)
    files.write("cgroup/memory/docker/abc/memory.stat", f"total_inactive_file {GIB // 2}\n")
    assert files.room() == (3 * GIB // 2, "cgroup memory.limit_in_bytes")


def test_a_limit_on_the_address_space_counts_less_what_is_mapped(files):
    assert files.room(address_space=3 * GIB) == (2 * GIB, "RLIMIT_AS")


def test_a_limit_already_passed_leaves_nothing_rather_than_less(files):
    assert files.room(address_space=GIB // 2) == (0, "RLIMIT_AS")


def test_a_system_without_figures_is_assumed_to_have_some_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.host_memory._address_space_limit", lambda: None)
    room = free_to_this_process(tmp_path / "none", tmp_path / "neither")
    assert room.free > 0
    assert "MemAvailable" not in room.limit


@pytest.mark.parametrize(
    ("machine", "device", "asked"),
    [
        (HOPPER, "auto", [HUB_DEFAULT, "SmolLM2-135M-Instruct"]),
        (HOPPER, "cpu", ["SmolLM2-135M-Instruct"]),
        (LAPTOP, "auto", ["SmolLM2-135M-Instruct"]),
    ],
)
def test_the_default_model_is_that_of_the_device_that_is_chosen(machine, device, asked, monkeypatch):
    """With a card the hub's is asked for first, and the packaged one where that cannot be had."""
    seen = []

    def not_here(model, progress):
        seen.append(getattr(model, "name", model))
        raise catalog.ModelUnavailable("cannot fetch it")

    monkeypatch.setattr(loading, "DeviceManager", lambda config: DeviceManager(config, machine))
    monkeypatch.setattr(catalog, "_from_hub", not_here)
    monkeypatch.setattr(catalog, "packaged_model", not_here)
    with pytest.raises(catalog.ModelUnavailable):
        loading.load_parts(EngineConfig(device=device), lambda stage, percent: None)
    assert seen == asked


# Ranks -----------------------------------------------------------------------------------------------------


def test_ranks_on_a_cpu_share_its_memory():
    assert budget(Machine(host=Room(4 * GIB, "MemAvailable")), device="cpu", tensor_parallel_size=2) == GIB // 2
    assert budget(Machine(host=Room(64 * GIB, "MemAvailable")), device="cpu", tensor_parallel_size=4) == GIB // 2
    manager = DeviceManager(EngineConfig(device="cpu", tensor_parallel_size=2), Machine(host=Room(GIB, "limit")))
    assert manager.free_bytes(manager.resolve()) == GIB // 2


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_cards_are_refused_with_both_numbers(device):
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 needs 2 CUDA cards, this machine has 1; use at most"):
        DeviceManager(EngineConfig(device=device, tensor_parallel_size=2), HOPPER).resolve()
    assert DeviceManager(EngineConfig(device="cpu", tensor_parallel_size=2), HOPPER).resolve().device.type == "cpu"
