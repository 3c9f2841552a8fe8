"""Attention over the paged KV cache: the module in a model's layer, and the contract of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from models.batch import ForwardBatch


class AttentionBackend(ABC):
    """Computes one layer's attention of one step. One object serves all layers.

    What a backend derives from the batch and not from the layer belongs into batch.scratch, under its own name.
    wants_device_lengths asks for the batch's query_start and context_lens_tensor; has_forward_qkv says that there is a
    forward_qkv. Which KV block size each prefers DeviceManager knows, which chooses before there is a backend.
    """

    name: str
    wants_device_lengths: bool = False
    has_forward_qkv: bool = False

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, batch: ForwardBatch
    ) -> Tensor:
        """Writes k and v to the batch's slots, then attends from every query to its sequence's past and itself.

        q [T, Hq, D], k and v [T, Hkv, D]; caches [num_blocks, block_size, Hkv, D]. Returns [T, Hq * D]. A row's
        result depends on its own sequence only.
        """

    def sequences_per_tile(self, num_heads: int, kv_heads: int, decodes: int) -> int:
        """Of a step of so many decodes, how many of those that have a prefix in common are best taken together (see
        SharedPrefixes); 0: the backend does not ask what they share."""
        return 0

    def release_buffers(self) -> None:  # noqa: B027  most backends keep none
        """Give back memory that is kept between steps only to save time."""

    def forward_qkv(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        batch: ForwardBatch,
    ) -> Tensor:
        """forward() from the projection's output qkv [T, (Hq + 2 * Hkv) * D]: norms the heads, where norms (of
        queries, of keys, eps) are given, and rotates them by rope's (cos, sin), all fused with the cache write.
        What qkv holds afterwards is undefined."""
        raise NotImplementedError(f"attention backend {self.name!r} has no forward_qkv")

    def warm_up(self, num_heads: int, k_cache: Tensor, v_cache: Tensor, most_decodes: int) -> None:
        """Called once the cache is bound, with one layer's: compiles what serving would otherwise wait for, in steps of
        at most so many decodes."""
        return


class Attention(nn.Module):
    """Holds one layer's views of the KV cache, which the model runner binds, and calls the backend."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.backend = backend
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        assert self.k_cache is not None and self.v_cache is not None, "bind_kv_cache comes before forward"
        return self.backend.forward(q, k, v, self.k_cache, self.v_cache, self.scale, batch)

    def forward_qkv(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """See AttentionBackend.forward_qkv."""
        assert self.k_cache is not None and self.v_cache is not None, "bind_kv_cache comes before forward"
        return self.backend.forward_qkv(qkv, norms, rope, self.k_cache, self.v_cache, self.scale, batch)


def attention_layers(model: nn.Module) -> list[Attention]:
    """The model's, in order."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def bind_kv_cache(model: nn.Module, kv: Tensor) -> None:
    """Gives each Attention of the model, in order, its layer of kv [layers, 2, num_blocks, block_size, Hkv, D]."""
    layers = attention_layers(model)
    if len(layers) != kv.shape[0]:
        raise ValueError(f"the KV cache has {kv.shape[0]} layers, the model {len(layers)}")
    for layer, (k_cache, v_cache) in zip(layers, kv, strict=True):
        layer.k_cache, layer.v_cache = k_cache, v_cache


def get_backend(name: str) -> AttentionBackend:
    """The backend of that name; ValueError for one that does not exist, ImportError where its package is missing."""
    if name == "sdpa":
        from models.layers.sdpa import SdpaBackend

        return SdpaBackend()
    if name == "triton":
        from models.layers.triton_attention import TritonBackend

        return TritonBackend()
    if name == "flash_attn":
        from models.layers.flash_attn import FlashAttnBackend

        return FlashAttnBackend()
    raise ValueError(f"attention backend {name!r} is not available; 'sdpa', 'triton' and 'flash_attn' are")
