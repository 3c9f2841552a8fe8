"""Processes with a card each that add up in one shot, with norms and without, eagerly and in a graph replayed many
times; see run()."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

REPLAYS = 200


def run(size: int, folder: Path, dtype: str) -> list[int | None]:
    """Exit codes of the ranks: 0 where every sum was right in every bit, and hence the same on all; norms nearly."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_main, args=(rank, size, folder, dtype), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    return [process.exitcode for process in ranks]


def _main(rank: int, size: int, folder: Path, dtype_name: str) -> None:
    from engine.rank import prepare_environment

    prepare_environment("cuda", size)
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from models.kernels import sum_norm
    from models.layers import one_shot
    from models.layers.layernorm import RMSNorm
    from models.layers.parallel import AllReduce

    device, dtype, width = torch.device("cuda", rank), getattr(torch, dtype_name), 1024
    torch.cuda.set_device(device)
    rendezvous = (folder / "rendezvous").as_uri()
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=size, device_id=device)
    layers = torch.nn.ModuleList(AllReduce(rank, size) for _ in range(2))
    how = one_shot.install(layers, width, dtype, device)
    sums, pair = layers[0].one_shot, [layer.sum_norm for layer in layers]
    assert isinstance(sums, one_shot.OneShot) and None not in pair, how

    def summands(rows: int, turn: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * rows + turn)
        return [torch.randn(rows, width, generator=generator).to(dtype).to(device) for _ in range(size)]

    def expected(parts: list[Tensor]) -> Tensor:
        """Added in the order of ranks, rounded each time."""
        total = parts[0]
        for part in parts[1:]:
            total = (total.double() + part.double()).to(dtype)
        return total

    rows_tried = [rows for rows in (1, 2, 3, 17, 64, 256) if sums.room(rows) is not None]
    assert len(rows_tried) > 4 and sums.room(10**6) is None
    for turn, rows in enumerate(rows_tried * 5):
        room, parts = sums.room(rows), summands(rows, turn)
        assert room is not None
        room.copy_(parts[rank])
        assert torch.equal(sums.sum(room), expected(parts)), f"eager, {rows} rows"
    for rows in (1, 64):
        room = sums.room(rows)
        assert room is not None
        x = torch.zeros(rows, width, dtype=dtype, device=device)
        stream = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outs = []
            for factor in (1, 2, 4):  # one behind the other in the same memory; exact, being powers of two
                torch.mul(x, factor, out=room)
                outs.append(sums.sum(room))
            wide = outs[0] + 0
            dist.all_reduce(wide)
            chosen = x[:, :4].clone()
            dist.broadcast(chosen, src=0)
        for turn in range(REPLAYS):
            parts = summands(rows, turn)
            x.copy_(parts[rank])
            graph.replay()
            for out, factor in zip(outs, (1, 2, 4), strict=True):
                assert torch.equal(out, expected(parts) * factor), f"replay {turn}, {rows} rows, times {factor}"
            assert torch.equal(chosen, parts[0][:, :4])
        del graph, outs
    norm = RMSNorm(width, 1e-6, dtype, device)
    norm.weight.data.copy_(torch.rand(width, generator=torch.Generator().manual_seed(5)) + 0.5)
    for rows in (1, 64, 256, 2048):
        x = torch.zeros(rows, width, dtype=dtype, device=device)
        residual = summands(rows, 77)[0]
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outs = []
            for factor in (1, 2, 4, 8):
                taken = pair[len(outs) % 2]
                torch.mul(x, factor, out=taken.room(rows))
                outs.append(taken(rows, norm, residual))
        for turn in range(REPLAYS if rows < 1000 else 20):
            parts = summands(rows, turn)
            x.copy_(parts[rank])
            graph.replay()
            for out, factor in zip(outs, (1, 2, 4, 8), strict=True):
                begun = sum_norm.Norm(norm.weight, norm.eps, residual)
                normed, total = sum_norm.reference([part * factor for part in parts], begun)
                assert torch.equal(out.total, total), f"replay {turn}, {rows} rows, times {factor}"
                torch.testing.assert_close(out.normed, normed, atol=2e-2, rtol=2e-2)
        del graph, outs
    torch.cuda.synchronize()
    os._exit(0)
