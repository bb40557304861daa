"""Parts of a quantized matrix, one on each rank, put together: what travels is what a GEMM reads, bytes and scales.

A matrix [M, K] is cut by rows, [m, K] on each of the ranks in their order. Of a rowwise copy every row is whole on its
rank. A columnwise copy has blocks along M, so it can be put together where m is a multiple of the block; it travels
turned, so that a rank's part is one piece of memory. Formats whose two copies share their scales (per tensor, 128x128
tiles) send the rowwise bytes for both: the columnwise copy is their exact transpose.

The padding is zeros, scales included.
"""

from __future__ import annotations

from collections.abc import Callable

from te_core import dtypes
from te_core.layers.carriers import Calls, Carrier
from te_core.layers.communicator import Communicator, Handle
from te_core.ops import raw as ops
from te_core.precision import Operand
from te_core.quantized import BLOCK, Copy, Format, QuantizedTensor, pieces_of
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Value = Tensor | QuantizedTensor


def turns(form: Format) -> bool:
    """Whether the columnwise copy is made of the rowwise one, once that is whole."""
    return form.scaling == "tensor" or (form.scaling == "block" and form.tiled)


def can_travel(rule: Operand | None, rows: int, columns: bool) -> bool:
    """Whether a part of `rows` rows is quantized where it lies, for the GEMM that reads its rows (or its columns).

    Else it travels in high precision, and is quantized whole.
    """
    if rule is None or rule.custom is not None or rule.scaling in ("calibrate", "none", "custom"):
        return False
    return _of_whole_blocks(rule.format, rows, columns)


def _of_whole_blocks(form: Format, rows: int, columns: bool) -> bool:
    if form.scaling == "tensor":
        return True
    if columns and form.row_scaled:  # an amax for each column, of which every rank has a part
        return False
    return rows % BLOCK[form.scaling] == 0 if columns or form.tiled else True


def of_one_scale(rt: Runtime, comm: Communicator, part: QuantizedTensor, columns: bool) -> bool:
    """Whether the ranks' parts can be put together, if somebody else than `can_travel`'s rule has quantized them.

    All ranks answer alike. Waits for the device where a part has one scale, or one maximum: they have to be equal.
    """
    form, by_columns = part.format, columns and not turns(part.format)
    there = part.columnwise if by_columns else part.rowwise
    if there is None or there.shape != pieces_of(rt.device, form, part.shape, by_columns).data:
        return False
    if not _of_whole_blocks(form, part.shape[0], columns):
        return False
    if form.scaling == "tensor":
        number = part.rowwise_scale
    elif form.scaling == "nvfp4" and not form.row_scaled:
        number = part.columnwise_amax if by_columns else part.rowwise_amax
    else:
        return True
    assert number is not None
    everyone = rt.empty((comm.size, 1), number.dtype)
    comm.all_gather(rt, number, everyone).wait()
    found = rt.numpy(everyone)
    return bool((found == found[0]).all())


class Gathering:
    """A matrix on its way: `wait()` gives it whole."""

    def __init__(self, rt: Runtime, carrier: Carrier, size: int) -> None:
        self.rt, self.size, self._carrier = rt, size, carrier
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._handle: Handle | None = None
        self._finish: Callable[[], Value] | None = None

    def send(self, part: Tensor, out: Tensor) -> None:
        """`out` is to be put together of the ranks' parts."""
        self._pairs.append((part, out))

    def begin(self, finish: Callable[[], Value]) -> Gathering:
        """All is on its way; `finish` makes the whole of it."""
        self._handle, self._finish = self._carrier.gather(self.rt, self._pairs), finish
        return self

    def wait(self) -> Value:
        """The whole."""
        assert self._handle is not None and self._finish is not None
        self._handle.wait()
        made = self._finish()
        self._pairs = []
        return made


def gather(
    rt: Runtime, comm: Communicator, part: Value, columns: bool = False, carrier: Carrier | None = None
) -> Gathering:
    """Begin to put together a matrix of the ranks' parts, its rowwise copy or (`columns`) its columnwise one."""
    found = Gathering(rt, carrier or Calls(comm), comm.size)
    if isinstance(part, Tensor):
        out = rt.empty((part.shape[0] * found.size, *part.shape[1:]), part.dtype)
        found.send(part, out)
        return found.begin(lambda: out)
    if columns and not turns(part.format):
        return _gather_columns(rt, found, part)
    return _gather_rows(rt, found, part)


def turned(rt: Runtime, whole: QuantizedTensor) -> QuantizedTensor:
    """The columnwise copy of a whole rowwise one, in a format where that is exact."""
    assert whole.rowwise is not None and whole.rowwise_scale is not None
    data, scale, form = ops.transpose(rt, whole.rowwise), whole.rowwise_scale, whole.format
    if form.tiled:
        shape = pieces_of(rt.device, form, whole.shape, True).scale
        scale = ops.transpose(rt, scale)
        if scale.shape != shape:  # padded the other way
            scale = ops.resize(rt, scale, *shape)
    return QuantizedTensor(form, whole.shape, None, Copy(data, scale, None))


def _room(rt: Runtime, form: Format, shape: tuple[int, int], columns: bool) -> QuantizedTensor:
    """Storage for one copy, its padding zero."""
    parts = pieces_of(rt.device, form, shape, columns)
    lines, along = (shape[1], shape[0]) if columns and form.transposed else shape
    full = parts.data[0] == lines and parts.data[1] * parts.data_type.bits == along * form.dtype.bits
    block = (rt.empty if full else rt.zeros)((parts.nbytes,), dtypes.uint8)
    made = (QuantizedTensor.columnwise_in if columns else QuantizedTensor.rowwise_in)(block, shape, form)
    scale = made.columnwise_scale if columns else made.rowwise_scale
    if full and form.scaling in ("mxfp8", "nvfp4") and scale is not None:  # these are padded further than the data
        rt.backend.zero(rt, scale)
    return made


def _gather_rows(rt: Runtime, found: Gathering, part: QuantizedTensor) -> Gathering:
    form, (m, k) = part.format, part.shape
    rows = m * found.size
    whole = _room(rt, form, (rows, k), False)
    data, scale = part.rowwise, part.rowwise_scale
    assert data is not None and scale is not None and whole.rowwise is not None and whole.rowwise_scale is not None
    finish: Callable[[], Value] = lambda: whole  # noqa: E731
    pieced = form.scaling == "block" and not form.tiled
    if pieced:  # [blocks, rows]: a rank's part is no piece of memory, unless it is turned
        blocks = scale.shape[0]
        scales = rt.empty((rows, blocks), scale.dtype)

        def finish() -> Value:
            target = whole.rowwise_scale
            assert target is not None
            ops.resize(rt, ops.transpose(rt, scales), *target.shape, out=target)
            return whole

    found.send(data.rows(0, m), whole.rowwise.rows(0, rows))
    if form.scaling == "tensor":
        whole.rowwise_scale = scale
    elif pieced:
        found.send(ops.transpose(rt, scale).rows(0, m), scales)
    else:
        step = BLOCK["block"] if form.scaling == "block" else 1
        found.send(scale.rows(0, m // step), whole.rowwise_scale.rows(0, rows // step))
    if form.row_scaled:
        assert part.rowwise_amax is not None and whole.rowwise_amax is not None
        found.send(part.rowwise_amax, whole.rowwise_amax)
    elif part.rowwise_amax is not None:
        whole.rowwise_amax = part.rowwise_amax
    return found.begin(finish)


def _gather_columns(rt: Runtime, found: Gathering, part: QuantizedTensor) -> Gathering:
    form, (m, k) = part.format, part.shape
    rows, step = m * found.size, BLOCK[part.format.scaling]
    whole = _room(rt, form, (rows, k), True)
    data, scale = part.columnwise, part.columnwise_scale
    target, scales = whole.columnwise, whole.columnwise_scale
    assert data is not None and scale is not None and target is not None and scales is not None
    if not form.transposed:  # mxfp8: [M, K] with its scales along M
        found.send(data, target)
        found.send(scale.rows(0, m // step), scales.rows(0, rows // step))
        return found.begin(lambda: whole)
    lines = rt.empty((target.shape[1], target.shape[0]), target.dtype)
    by_block = form.scaling == "nvfp4"  # its scales lie line by line, those of the others block by block
    blocks = rt.empty((rows // step, scales.shape[0]), scales.dtype) if by_block else scales

    def finish() -> Value:
        ops.transpose(rt, lines, out=target)
        if by_block:
            ops.resize(rt, ops.transpose(rt, blocks), *scales.shape, out=scales)
        return whole

    found.send(ops.transpose(rt, data), lines)
    found.send(ops.transpose(rt, scale).rows(0, m // step) if by_block else scale, blocks)
    whole.columnwise_amax = part.columnwise_amax
    return found.begin(finish)
