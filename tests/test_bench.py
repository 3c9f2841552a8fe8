"""bench.py as it is called: what it refuses, what it measures, what it writes."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bench
import bench_table
import bench_workers
from bench_engines import Engine, Setup, Transformers
from bench_workloads import DEFAULT, workloads
from processes import descendants, gone

ROOT = Path(__file__).resolve().parent.parent
ROW_KEYS = {
    *("workload", "metric", "unit", "engine", "model", "tp", "dtype", "kv_dtype", "speculation", "card"),
    *("median", "runs"),
}


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def tiny(make_tiny_model: Callable[..., Path]) -> str:
    """Every id below 10,000 is in its vocabulary and the longest chat fits its context."""
    return str(make_tiny_model("llama", vocab_size=10001, max_position_embeddings=2304))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--engine", "pageturn,abacus"], "'abacus'"),
        (["--workload", "decode_b1,decode_b7"], "'decode_b7'"),
        (["--runs", "0"], "--runs 0"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at"),
        (["--table", "/nowhere.json"], "/nowhere.json"),
        (["--device", "cpu", "--random-weights", "--model", "/no/such/shapes"], "/no/such/shapes"),
        (["--device", "cpu", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_line_and_exit_code_2(arguments: list[str], word: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_help_says_what_each_workload_does_on_either_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["bench.py", "--help"])
        bench.options()
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for device in ("cpu", "cuda"):
        table = workloads(device)
        assert set(DEFAULT[device].split()) <= table.keys()
        for name, workload in table.items():
            (at,) = [i for i, line in enumerate(lines) if line.split()[:1] == [name]]
            assert any(line.endswith(f" {workload.about}") for line in lines[at : at + 2]), (device, name)
            assert max(map(len, lines[at : at + 2])) <= 120
    assert workloads("cpu")["decode_b1"].about != workloads("cuda")["decode_b1"].about


def test_a_file_that_holds_something_else_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"my": "notes"}')
    assert call("--json", str(file)).returncode == 2
    assert file.read_text() == '{"my": "notes"}'


def test_two_calls_with_one_file_give_the_rows_of_both(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    common = ["--device", "cpu", "--model", tiny, "--json", str(file)]
    first = call(*common, "--runs", "2", "--engine", "pageturn,transformers", "--workload", "ttft_turn2")
    assert first.returncode == 0, first.stdout + first.stderr
    second = call(*common, "--runs", "1", "--workload", "load")
    assert second.returncode == 0, second.stdout + second.stderr

    content = json.loads(file.read_text())
    assert content.keys() == {"date", "host", "versions", "rows"}
    assert {"torch", "transformers", "python"} <= content["versions"].keys()
    found = [(row["workload"], row["metric"], row["unit"], row["engine"]) for row in content["rows"]]
    assert found == [
        ("ttft_turn2", "ttft", "ms", "pageturn"),
        ("ttft_turn2", "ttft", "ms", "transformers"),
        ("load", "ready", "s", "pageturn"),
        ("load", "first_token", "s", "pageturn"),
    ]
    for row in content["rows"]:
        assert row.keys() == ROW_KEYS
        assert len(row["runs"]) == (1 if row["workload"] == "load" else 2)
        assert min(row["runs"]) <= row["median"] <= max(row["runs"])
    ready, first_token = (row["median"] for row in content["rows"][2:])
    assert 0 < ready < first_token
    assert "x as fast" in first.stdout


def test_an_engine_that_fails_says_why_and_the_others_go_on(tiny: str) -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vllm is installed here")
    common = ["--device", "cpu", "--model", tiny, "--runs", "1"]
    done = call(*common, "--engine", "vllm,pageturn", "--workload", "ttft_cold")
    assert done.returncode == 1
    assert "ttft_cold  vllm  failed: not installed (vllm)" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.split()[:3] == ["ttft_cold", "ttft", "pageturn"]]


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_without_what_transformers_reads_it_with_names_the_package(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    setup = Setup("/no/such/model.gguf", "cpu", "float32", 1, "auto", "transformers", "offline")
    with pytest.raises(ModuleNotFoundError, match=package):
        Transformers(setup)


@pytest.mark.long
def test_conversations_through_the_async_engine_find_their_history_cached(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    done = call("--device", "cpu", "--model", tiny, "--workload", "chat_1", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["metric"]: row for row in json.loads(file.read_text())["rows"]}
    # Turn k's prompt is 512 + 256 (k - 1) + 128 tokens; all of it but the last turn's 128 asked, the last sampled
    # token and at most one unfilled block was served before.
    assert rows["prompt_tokens_cached"]["median"] > 0.85
    assert rows["throughput"]["median"] > 0


def test_no_two_runs_share_a_prompt() -> None:
    class Recorder(Engine):
        def __init__(self) -> None:
            self.seen: list[tuple[int, ...]] = []

        def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
            self.seen += [tuple(prompt[:16]) for prompt in prompts]

    for name in ("decode_b1", "decode_b8", "prefill_1024", "ttft_cold"):
        engine = Recorder()
        for k in range(3):
            workloads("cpu")[name].run(engine, k)
        assert len(set(engine.seen)) == len(engine.seen) > 2, name


def test_a_config_alone_is_measured_with_random_weights(tiny: str, tmp_path: Path) -> None:
    shapes, file = tmp_path / "shapes-only", tmp_path / "random.json"
    shapes.mkdir()
    (shapes / "config.json").write_text((Path(tiny) / "config.json").read_text())
    common = ["--device", "cpu", "--random-weights", "--model", str(shapes), "--runs", "1", "--json", str(file)]
    done = call(*common, "--workload", "ttft_cold")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["model"] for row in json.loads(file.read_text())["rows"]] == ["shapes-only"]
    assert [entry.name for entry in shapes.iterdir()] == ["config.json"], "nothing is left there"
    table = call("--table", str(file))
    assert "| ttft_cold (ms) |" in table.stdout


def test_an_engine_that_hangs_is_ended_with_all_it_started_and_what_was_measured_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker answers at its start and to the first workload; then it hangs, and a process of its own with it."""
    child = tmp_path / "child"
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, subprocess, sys, time\n"
        "sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(child)!r}, 'w').write(str(sleeper.pid))\n"
        "print(json.dumps({'dtype': 'x', 'versions': {}}), flush=True)\n"
        "sys.stdin.readline(), print(json.dumps({'ttft': 1.5}), flush=True)\n"
        "print('in the midst of it', file=sys.stderr, flush=True)\n"
        "time.sleep(100)\n"
    )
    monkeypatch.setattr(bench_workers, "__file__", str(script))
    results = bench_workers.Results()
    setup = Setup("model", "cpu", "float32", 1, "auto")
    list(bench_workers.measure(setup, ["pageturn"], ["ttft_cold", "prefill_1024"], 1, 3.0, results))
    assert results.runs == {("ttft_cold", "ttft", "pageturn"): [1.5]}
    failed, why = results.missing["prefill_1024", "pageturn"]
    assert failed and why == "no answer within 3 s; it last said: in the midst of it"
    assert gone([int(child.read_text())], 5.0)


def test_one_that_is_ended_in_the_midst_of_a_run_is_gone_at_once_with_its_engines(tiny: str) -> None:
    command = [sys.executable, str(ROOT / "bench.py"), "--device", "cpu", "--model", tiny]
    command += ["--workload", "load,decode_b8", "--runs", "1000"]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert program.stderr is not None
    assert any("engines pageturn" in line for line in program.stderr)  # its first engine is on its way
    started = set(descendants(program.pid))
    program.terminate()
    assert program.wait(30) == 128 + signal.SIGTERM
    assert gone(started, seconds=10)
    program.stderr.close()


def test_the_table_has_the_ratio_its_goal_and_the_bound() -> None:
    def row(workload: str, metric: str, unit: str, engine: str, median: float) -> dict:
        about = {"model": "qwen3-0.6b", "tp": 1, "dtype": "bfloat16", "kv_dtype": "auto", "card": "NVIDIA H200"}
        return {"workload": workload, "metric": metric, "unit": unit, "engine": engine, "median": median, **about}

    ours = {
        "date": "2026-01-02T03:04:05",
        "versions": {"torch": "2.11"},
        "rows": [
            row("decode_b1", "decode", "tok/s", "pageturn", 1.0),
            row("decode_b1", "decode", "tok/s", "pageturn", 1200.0),
            row("ttft_cold_3584", "ttft", "ms", "pageturn", 13.0),
            row("decode_b1_thread", "decode", "tok/s", "pageturn", 1176.0),
        ],
    }
    theirs = {
        "date": "2026-01-02T04:04:05",
        "versions": {"torch": "2.11", "vllm": "1"},
        "rows": [
            row("decode_b1", "decode", "tok/s", "vllm", 500.0),
            row("ttft_cold_3584", "ttft", "ms", "vllm", 20.0),
        ],
    }
    lines = bench_table.markdown([ours, theirs]).splitlines()
    assert lines[0].startswith("NVIDIA H200, qwen3-0.6b, pageturn: bfloat16; vllm: bfloat16; KV cache auto; torch 2.11")
    assert "| decode_b1 (tok/s) | 1,200 | 500 | 2.40x | ≥ 2x (met) | 3,600 |" in lines
    assert "| ttft_cold_3584 (ms) | 13 | 20 | 0.65x | ≤ 0.6x (short) | 7.3 |" in lines
    assert "| decode_b1 (tok/s) | 1,200 | 1,176 | 0.980 | ≥ 0.97 |" in lines


def test_one_that_is_ended_while_it_waits_for_an_engines_end_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import time; time.sleep(100)")
    monkeypatch.setattr(bench_workers, "__file__", str(script))

    def interrupted(process: subprocess.Popen[str], timeout: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), bench_workers.Worker(Setup("m", "cpu", "float32", 1, "auto"), 9.0) as worker:
        monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    assert worker.process.poll() == -signal.SIGKILL
