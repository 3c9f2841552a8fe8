"""GGUF files: every type read to its values, and every kind of damage one clear error."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.dequantize import read_tensor
from models.gguf import GGUFError, GGUFFile
from tests.models.gguf_writer import gguf, quantise, string, value

METADATA = {
    "general.architecture": ("str", "llama"),
    "a.flag": ("bool", True),
    "a.count": ("u64", 2**40),
    "a.ratio": ("f32", 0.5),
    "a.words": ("[str]", ["x", "é", ""]),
    "a.numbers": ("[i32]", [1, -2, 3]),
}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def sample() -> bytes:
    f32 = np.arange(64, dtype="<f4").reshape(2, 32)
    q4, _ = quantise("Q4_1", np.linspace(-1, 1, 64).reshape(2, 32))
    return gguf(METADATA, {"plain": (0, (2, 32), f32.tobytes()), "packed": (3, (2, 32), q4)})


def test_metadata_and_directory_come_back(tmp_path: Path, sample: bytes) -> None:
    file = GGUFFile(write(tmp_path / "a.gguf", sample))
    assert file.metadata == {key: content for key, (_, content) in METADATA.items()}
    assert file.tensors["plain"].shape == (2, 32)
    assert torch.equal(read_tensor(file, "plain"), torch.arange(64.0).view(2, 32))


@pytest.mark.parametrize(("kind", "type_id"), [("Q4_0", 2), ("Q4_1", 3), ("Q8_0", 8)])
def test_quantised_blocks_become_their_values(tmp_path: Path, kind: str, type_id: int) -> None:
    x = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    data, values = quantise(kind, x)
    file = GGUFFile(write(tmp_path / "a.gguf", gguf({}, {"t": (type_id, (6, 96), data)})))
    got = read_tensor(file, "t")
    assert torch.equal(got, torch.from_numpy(values))
    assert (got - torch.from_numpy(x)).abs().max() < 0.4  # the packing itself is sane


@pytest.mark.parametrize(("type_id", "dtype"), [(0, torch.float32), (1, torch.float16), (30, torch.bfloat16)])
def test_plain_types_come_back_bit_for_bit(tmp_path: Path, type_id: int, dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    content = x.view(torch.uint8).numpy().tobytes()
    file = GGUFFile(write(tmp_path / "a.gguf", gguf({}, {"t": (type_id, (4, 8), content)})))
    assert torch.equal(read_tensor(file, "t"), x)


@pytest.mark.parametrize(("type_id", "name"), [(12, "Q4_K"), (14, "Q6_K"), (20, "IQ4_NL"), (999, "999")])
def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path, type_id: int, name: str) -> None:
    path = write(tmp_path / "a.gguf", gguf({}, {"blk.0.w": (type_id, (1, 256), bytes(256))}))
    with pytest.raises(GGUFError, match=rf"'blk\.0\.w' has type .*{name}.*not supported"):
        GGUFFile(path)


def test_every_truncation_is_one_clear_error(tmp_path: Path, sample: bytes) -> None:
    """At each length short of the whole, data included."""
    path = tmp_path / "cut.gguf"
    for length in range(len(sample) - 24):  # the last 24 bytes are padding
        path.write_bytes(sample[:length])
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        assert "cut.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_the_default_model_cut_anywhere_is_refused(tmp_path: Path, default_model_path: Path) -> None:
    whole = default_model_path.read_bytes()
    for share in (0.0005, 0.005, 0.01, 0.03, 0.5, 0.999):
        with pytest.raises(GGUFError, match="cut short"):
            GGUFFile(write(tmp_path / "cut.gguf", whole[: int(len(whole) * share)]))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 500), new=st.binary(min_size=1, max_size=8))
def test_damaged_bytes_never_hang_or_escape_as_another_error(
    tmp_path: Path, sample: bytes, at: int, new: bytes
) -> None:
    path = write(tmp_path / "bad.gguf", sample[:at] + new + sample[at + len(new) :])
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            read_tensor(file, name)
    except GGUFError:
        pass


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 bytes"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"FUGG" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(32), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(32), "tensor count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62) + bytes(32), "metadata count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60) + bytes(32), "a metadata key"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 77) + bytes(32), "value type 77"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(32),
            "the length of 'k'",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(32),
            "array of unsupported type 9",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string("k") + value("u8", 1)) * 2 + bytes(32), "twice"),
    ],
)
def test_absurd_headers_are_refused_with_what_is_wrong(tmp_path: Path, content: bytes, named: str) -> None:
    with pytest.raises(GGUFError, match=named):
        GGUFFile(write(tmp_path / "a.gguf", content))


@pytest.mark.parametrize(
    ("shape", "named"),
    [((2**40, 2**40), "cut short"), ((4, 31), "multiple of the 32"), ((0, 32), "empty"), ((1,) * 5, "5 dimensions")],
)
def test_absurd_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...], named: str) -> None:
    with pytest.raises(GGUFError, match=named):
        GGUFFile(write(tmp_path / "a.gguf", gguf({}, {"t": (3, shape, bytes(640))})))


def test_metadata_of_another_kind_is_named(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "a.gguf", gguf({"k": ("str", "x"), "flag": ("bool", True)}, {})))
    with pytest.raises(GGUFError, match="'k' is 'x'; expected int"):
        file.get("k", int)
    with pytest.raises(GGUFError, match="'flag' is True; expected int"):
        file.get("flag", int)
    with pytest.raises(GGUFError, match="'absent' is missing"):
        file.require("absent", str)
