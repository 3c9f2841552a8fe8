"""The group of rank processes: how it loads, answers, is found dead or hanging, and what is left of it. The processes
are real; the model in them is a stand-in, so that they start in a moment."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

import standin_rank
from engine import EngineConfig, SamplingParams, rank, rank_group
from engine.model_runner import StepHandle
from engine.plan_deltas import PlanEncoder
from engine.rank import Chores
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, SequenceStatus
from engine.tensor_parallel import RanksLost, TensorParallelRunner
from models.config import ModelConfig
from processes import descendants, gone, left_in_shared_memory, shared_memory

Opened = Callable[..., TensorParallelRunner]
_request_ids = itertools.count(1)


@pytest.fixture
def open_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Opened]:
    """open_runner(script): a TensorParallelRunner over two stand-in ranks."""
    monkeypatch.setattr(rank_group, "main", standin_rank.main)
    monkeypatch.setattr(rank_group, "_LAST_WORDS", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = []

    def open_(script: str, progress: Callable[[str, float], None] = lambda stage, percent: None):
        device = SimpleNamespace(
            device=SimpleNamespace(type="cpu"), dtype="torch.float32", attention_backend="sdpa", block_size=16
        )
        model_config = ModelConfig("Stand-in", 97, 1, 1, 1, 2, 2, 1, 64)
        config = EngineConfig(tensor_parallel_size=2)
        runner = TensorParallelRunner(config, Path(script), model_config, device, limits={}, progress=progress)  # type: ignore[arg-type]
        opened.append(runner)
        return runner

    yield open_
    for runner in opened:
        runner.exit()
    assert not list(tmp_path.glob("pageturn-ranks-*"))


def a_plan(length: int = 1, start: int = 0) -> StepPlan:
    seq = Sequence(next(_request_ids), [5] * length, SamplingParams(), seed=0, max_tokens=9, stop_ids=frozenset())
    seq.status, seq.block_table = SequenceStatus.RUNNING, [0]
    return StepPlan([ScheduledSequence(seq, start, length - start, True)], 0, length - start)


def step(runner: TensorParallelRunner, plan: StepPlan | None = None) -> list[int]:
    return runner.collect(runner.launch(plan or a_plan()))


def after_two_steps(runner: TensorParallelRunner) -> TensorParallelRunner:
    assert step(runner) == [1]
    assert step(runner) == [2]
    return runner


def test_ranks_with_unequal_memory_agree_on_the_smallest_block_count(open_runner: Opened) -> None:
    runner = after_two_steps(open_runner("echo"))
    assert runner.num_blocks == 70
    assert step(runner)[0] == 70, "rank 0 has another count"


def test_a_rebuilt_group_keeps_the_block_count(open_runner: Opened) -> None:
    runner = open_runner("echo")
    runner.num_blocks = 33  # as if memory had been scarcer when it was first started
    runner.rebuild(RanksLost("for this test"), lambda stage, percent: None)
    after_two_steps(runner)
    assert step(runner)[0] == 33


def test_a_message_of_any_size_passes(open_runner: Opened) -> None:
    runner = after_two_steps(open_runner("echo"))
    runner.forget(1)
    assert step(runner, a_plan(5_000_000, start=4_999_999))[1] == 5_000_000


def test_what_keeps_a_rank_from_loading_is_raised_as_it_is(open_runner: Opened) -> None:
    with pytest.raises(ValueError, match="weights are missing"):
        open_runner("cannot load")


def test_a_rank_that_dies_while_loading_is_noticed_at_once(open_runner: Opened) -> None:
    started = time.monotonic()
    with pytest.raises(RanksLost, match=r"rank 1 was killed by SIGKILL.*memory"):
        open_runner("dies loading")
    assert time.monotonic() - started < 10


def test_a_slow_load_reports_its_progress_and_is_no_hang(open_runner: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tensor_parallel.PATIENCE", 1.0)
    seen: list[tuple[str, float]] = []
    after_two_steps(open_runner("slow to load", lambda stage, percent: seen.append((stage, percent))))
    assert seen.count(("loading weights", 50.0)) > 4, "nothing is heard while a rank loads"


def test_a_load_can_be_called_off(open_runner: Opened) -> None:
    def stop(stage: str, percent: float) -> None:
        if stage == "loading weights":
            raise KeyboardInterrupt

    before = set(descendants(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        open_runner("slow to load", stop)
    assert gone(set(descendants(os.getpid())) - before, seconds=0, but="resource_tracker")


def test_a_dead_rank_is_noticed_at_once_in_a_step_and_between_steps(open_runner: Opened) -> None:
    runner = after_two_steps(open_runner("exits"))
    started = time.monotonic()
    with pytest.raises(RanksLost, match="rank 1 died with exit code 3"):
        step(runner)
    assert time.monotonic() - started < 10
    loss = runner.loss()
    assert loss is not None and "rank 1" in str(loss)
    with pytest.raises(RanksLost):
        step(runner)
    runner.rebuild(loss, lambda stage, percent: None)
    assert runner.loss() is None
    after_two_steps(runner)


@pytest.mark.parametrize(("length", "seconds"), [(1, 0.3), (64, 1.7)])
def test_a_rank_that_hangs_is_lost_after_a_time_that_grows_with_the_work(
    length: int, seconds: float, open_runner: Opened
) -> None:
    runner = after_two_steps(open_runner("hangs"))
    runner.patience = 0.3
    runner.forget(1)
    started = time.monotonic()
    with pytest.raises(RanksLost, match=rf"rank 0, 1 has not answered for {seconds} s: it hangs"):
        step(runner, a_plan(length))
    assert time.monotonic() - started > seconds - 0.1


def test_a_rank_that_compiles_a_kernel_in_the_midst_of_a_step_does_not_hang(open_runner: Opened) -> None:
    runner = after_two_steps(open_runner("compiles"))
    runner.patience = 0.3
    runner.forget(1)
    started = time.monotonic()
    assert step(runner, a_plan(2)) == [3]
    assert time.monotonic() - started > 1.4


def test_a_rank_that_reads_nothing_is_lost_too(open_runner: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "WRITE_PATIENCE", 1.0)
    runner = after_two_steps(open_runner("echo"))
    os.kill(runner._group.processes[1].pid, signal.SIGSTOP)
    runner.forget(1)
    with pytest.raises(RanksLost, match=r"rank 1 has read nothing for 1\.0 s"):
        step(runner, a_plan(5_000_000, start=4_999_999))


def test_an_exception_that_all_ranks_meet_is_raised_and_the_group_goes_on(open_runner: Opened) -> None:
    runner = after_two_steps(open_runner("all fail"))
    with pytest.raises(ZeroDivisionError, match="in the model"):
        step(runner)
    assert step(runner) == [1]


@pytest.mark.parametrize("script", ["one fails", "out of step", "spoiled"])
def test_an_exception_that_leaves_the_ranks_apart_loses_the_group_with_its_cause(
    script: str, open_runner: Opened
) -> None:
    runner = after_two_steps(open_runner(script))
    with pytest.raises(RanksLost, match="ZeroDivisionError: in the model") as caught:
        step(runner)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_answers_that_an_interrupt_left_behind_are_not_taken_for_the_next_steps(open_runner: Opened) -> None:
    runner = open_runner("echo")
    handle = runner.launch(a_plan())
    assert isinstance(handle, StepHandle)  # and ^C comes before collect()
    assert step(runner) == [2]


def test_an_interrupt_between_the_answers_of_two_ranks_loses_neither(
    open_runner: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner("echo")
    take, taken = runner._group._next, []

    def interrupted(seconds: float) -> object:
        if taken:
            raise KeyboardInterrupt
        taken.append(take(seconds))
        return taken[0]

    with monkeypatch.context() as patch:
        patch.setattr(runner._group, "_next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(runner)
    assert taken[0] is not None
    assert step(runner) == [2]


def test_a_command_that_was_interrupted_half_way_loses_the_group(
    open_runner: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner("echo")

    def interrupted(message: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner._group, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(runner)
    with pytest.raises(RanksLost, match="interrupted half-way"):
        step(runner)


# -- what is left ---------------------------------------------------------------------------------------------


PARENT = """
import sys, time
from pathlib import Path
import standin_rank
from engine import EngineConfig, rank_group
from engine.rank import RankSetup
from models.config import ModelConfig

def setup(rank, folder):
    shape = ModelConfig("Stand-in", 97, 1, 1, 1, 2, 2, 1, 64)
    config = EngineConfig(tensor_parallel_size=2)
    return RankSetup(rank, 2, folder, config, Path("hangs"), shape, "cpu", "float32", "sdpa", 16, {})

def serve():
    rank_group.main = standin_rank.main
    group = rank_group.RankGroup(2, setup)
    group.load(lambda stage, percent: None)
    print("ready", flush=True)
    how = sys.stdin.readline().strip()
    if how == "exit without a word":
        return group
    if how == "raise":
        raise RuntimeError("the parent's own fault")
    if how == "exit with none kept":
        return None
    if how == "drop it and live on":
        del group
        print("dropped", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    kept = serve()
"""


WAYS = ["exit without a word", "exit with none kept", "raise", "SIGKILL", "SIGTERM", "SIGINT to the group"]


@pytest.mark.parametrize("how", [*WAYS, "drop it and live on"])
def test_nothing_is_left_of_the_ranks_however_the_parent_ends(how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARENT)
    root = Path(__file__).parents[2]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared = shared_memory()
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests' / 'support'}", "TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, str(program)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, text=True,
    )  # fmt: skip
    assert parent.stdin is not None and parent.stdout is not None
    try:
        assert parent.stdout.readline() == "ready\n"
        started = descendants(parent.pid)
        assert len(started) >= 2 and list(temporary.glob("pageturn-ranks-*"))
        if how.startswith("SIG"):
            send = os.killpg if how.endswith("group") else os.kill
            send(parent.pid, getattr(signal, how.split()[0]))
        else:
            parent.stdin.write(how + "\n")
            parent.stdin.flush()
        if how == "drop it and live on":
            assert parent.stdout.readline() == "dropped\n"
            assert gone(started, seconds=2, but="resource_tracker") and parent.poll() is None
        else:
            parent.wait(timeout=5)
            assert gone(started, seconds=2)
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
    assert not list(temporary.glob("pageturn-ranks-*"))
    assert not left_in_shared_memory(shared)


def test_a_fork_of_the_parent_ends_no_rank(open_runner: Opened) -> None:
    runner = after_two_steps(open_runner("echo"))
    child = os.fork()
    if not child:
        with contextlib.suppress(AssertionError):  # multiprocessing's, of whoever is not the parent
            runner._group.kill()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert runner.loss() is None
    assert step(runner) == [70, 1]


def test_a_rank_that_failed_at_a_chore_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step could be run again in parts, but without the block that was to be copied first."""

    def fail(copies: dict[int, int]) -> None:
        raise MemoryError("no room for a copy")

    model = SimpleNamespace(modules=list)
    device = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    runner = SimpleNamespace(model=model, graphs=None, copy_blocks=fail, device=device)
    ours, theirs = Pipe()
    ours.send((PlanEncoder().encode(a_plan()), Chores(copies={1: 0}), False))
    ours.send(None)
    rank.RankLoop(runner, theirs, speaks=True).serve()  # type: ignore[arg-type]
    kind, error, calls = ours.recv()
    assert (kind, str(error), calls) == ("failed", "no room for a copy", None)
