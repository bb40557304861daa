"""What travels: memory that saved tensors are views of, and what the graph holds in the place of a saved tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_core.errors import ArgumentError
from te_torch.training.offload.device import THRESHOLD, Moved, Side

_ALIGNED = 512  # bytes: what the allocator aligns to, so that a copy is read as its source was


class View:
    """A saved tensor that may travel: the tensor while it is on the device, else where in its block it lies."""

    __slots__ = ("__weakref__", "alias", "block", "changed", "dtype", "offset", "shape", "stride", "version")

    def __init__(self, t: torch.Tensor, block: Block) -> None:
        # Detached: the graph, which holds this, must not be held by it. It shares memory and count of changes.
        self.alias: torch.Tensor | None = t.detach()
        self.block = block
        self.version, self.changed = t._version, False
        self.dtype, self.shape, self.stride, self.offset = t.dtype, t.shape, t.stride(), t.storage_offset()

    def span(self) -> tuple[int, int]:
        """The bytes of the storage that it covers."""
        size = self.dtype.itemsize
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return int(self.offset) * size, int(self.offset + last + 1) * size

    def note_changes(self) -> None:
        """See whether the tensor was changed in place since it was saved: then it is not what backward needs."""
        if self.alias is not None and self.alias._version != self.version:
            self.changed = True

    def tensor(self) -> torch.Tensor:
        """The saved tensor, from wherever it is."""
        self.note_changes()
        if self.changed:
            raise RuntimeError(changed(self.shape))
        return self.block.view(self) if self.alias is None else self.alias


class Stays:
    """A saved tensor that stays where it is."""

    __slots__ = ("t", "version")

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t if isinstance(t, torch.nn.Parameter) else t.detach()
        self.version = t._version

    def tensor(self) -> torch.Tensor:
        """The saved tensor."""
        if self.t._version != self.version:
            raise RuntimeError(changed(self.t.shape))
        return self.t


class Quantized:
    """A saved tensor that is held quantized: its codes and scales, each by itself."""

    __slots__ = ("kind", "meta", "parts", "place")

    def __init__(self, t: Any, meta: Any, parts: dict[str, Any]) -> None:
        self.kind, self.meta, self.parts, self.place = type(t), meta, parts, (t.shape, t.stride())

    def tensor(self) -> Any:
        """The saved tensor over its codes and scales."""
        inner = {name: part.tensor() for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__(inner, self.meta, *self.place)


def changed(shape: Any) -> str:
    """As torch says it where no hooks keep what is saved."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(shape)} that was saved for backward in an offload context"
    )


class Block(Moved):
    """Memory that saved tensors are views of: on the device, copied to the host, on the host alone, or back.

    Views hold their block, and it holds them weakly: with the graph all goes.
    """

    __slots__ = (
        "away", "device", "high", "host", "low", "started", "stays", "storage", "ticket", "users", "version", "views",
    )  # fmt: skip

    def __init__(self, t: torch.Tensor, side: Side) -> None:
        super().__init__(side)
        self.version = t._version
        self.storage = StorageWeakRef(t.untyped_storage())  # while it is held no other storage gets the same address
        self.views: list[weakref.ref[View]] = []
        self.users: set[Any] = set()  # layers whose forward or what follows it may still read it
        self.stays = self.started = self.away = False
        self.low = self.high = 0
        self.host: torch.Tensor | None = None
        self.device: torch.Tensor | None = None  # where it came back to
        self.ticket: Any = None

    def takes(self, t: torch.Tensor) -> bool:
        """Whether a tensor of this storage is a view of what this block holds."""
        return t._version == self.version and not self.away and self.device is None

    def add(self, t: torch.Tensor) -> View:
        """A further tensor of this memory."""
        view = View(t, self)
        self.views.append(weakref.ref(view))
        low, high = view.span()
        if self.started and (low < self.low or high > self.high):
            self.stays = True  # what was copied does not hold it
        return view

    def _live(self) -> Iterator[View]:
        for ref in self.views:
            view = ref()
            if view is not None:
                yield view

    def worth_it(self) -> bool:
        """Whether it travels: something in it is large, and the views are most of the memory that would be freed."""
        views = list(self._live())
        if self.stays or self.started or not any(v.shape.numel() >= THRESHOLD for v in views):
            return False
        spans = [v.span() for v in views]
        self.low = min(low for low, _ in spans) // _ALIGNED * _ALIGNED
        self.high = max(high for _, high in spans)
        alias = views[0].alias
        assert alias is not None
        return 2 * (self.high - self.low) >= alias.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """How much travels."""
        return self.high - self.low

    def source(self) -> torch.Tensor:
        """Its bytes on the device."""
        alias = next(v.alias for v in self._live() if v.alias is not None)
        flat = torch.empty(0, dtype=torch.uint8, device=alias.device)
        return flat.set_(alias.untyped_storage(), self.low, (self.nbytes,), (1,))

    def release(self) -> None:
        """Let go of the device's memory. The copy must have been waited for."""
        if self.stays or not self.started or self.away:
            return
        for view in self._live():
            view.note_changes()
            view.alias = None
        self.away = True

    def come_back(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory on the device, and the copy on the host that is to fill it."""
        assert self.host is not None
        self.device, self.away = self.side.room(self.nbytes), False
        return self.device, self.host

    def arrived(self) -> None:
        """The copy back was waited for: the host's memory may be used again."""
        self.ticket = self.moving = None
        if self.device is not None:
            self.host = None

    def view(self, view: View) -> torch.Tensor:
        """A tensor that was released, after it has come back."""
        if self.device is None:
            raise RuntimeError("a tensor that was offloaded is read before its layer was reloaded")
        if self.ticket is not None:
            self.side.wait(self.ticket)
            self.arrived()
        offset = view.offset - self.low // view.dtype.itemsize
        made = torch.empty(0, dtype=view.dtype, device=self.device.device)
        return made.set_(self.device.untyped_storage(), offset, view.shape, view.stride)


class HostBuffers:
    """The host's memory of a context; with `retain` each layer has the same buffers in every pass."""

    def __init__(self, retain: bool) -> None:
        self.retain = retain
        self._sizes: dict[int, list[int]] = {}
        self._kept: dict[tuple[int, int], list[tuple[torch.Tensor, weakref.ref[Block]]]] = {}

    def give(self, layer: int, blocks: list[Block]) -> None:
        """Memory for the blocks of a layer."""
        if not self.retain:
            for block in blocks:
                block.host = block.side.host(block.nbytes)
            return
        sizes = [block.nbytes for block in blocks]
        if self._sizes.setdefault(layer, sizes) != sizes:
            raise ArgumentError(
                "get_cpu_offload_context(retain_pinned_cpu_buffers=True)",
                f"layer {layer} with tensors of {sizes} bytes after one of {self._sizes[layer]}",
                "the same shapes in every pass, which retained buffers are of",
                "keep the shapes, or leave retain_pinned_cpu_buffers out",
            )
        for slot, block in enumerate(blocks):
            block.host = self._free(layer, slot, block)

    def _free(self, layer: int, slot: int, block: Block) -> torch.Tensor:
        """A buffer of this slot that no other block has; there are as many as passes that wait for their backward."""
        kept = self._kept.setdefault((layer, slot), [])
        for i, (buffer, ref) in enumerate(kept):
            user = ref()
            if user is None or user.host is not buffer:
                kept[i] = (buffer, weakref.ref(block))
                return buffer
        buffer = block.side.host(block.nbytes)
        kept.append((buffer, weakref.ref(block)))
        return buffer
