"""The matrices of a param: their shapes, the blocks that they lie in, what they cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import MatrixSpec, ParamSpec, Span

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> MatrixSpec:
    dim, sizes, repeats, other = (
        draw(st.sampled_from((0, 1))),
        draw(SIZES),
        draw(st.integers(1, 3)),
        draw(SIZES),
    )
    lengths = [sum(sizes) * repeats, len(other)]
    rows, cols = lengths if dim == 0 else reversed(lengths)
    return MatrixSpec(rows, cols, dim, sizes, repeats)


@pytest.mark.parametrize(
    ("spec", "shapes", "num_blocks"),
    [
        pytest.param(MatrixSpec(3, 5), ((3, 5),), 1, id="one matrix"),
        pytest.param(
            MatrixSpec(6, 5, sizes=(3, 3)),
            ((3, 5), (3, 5)),
            2,
            id="gate and up, one after the other",
        ),
        pytest.param(
            MatrixSpec(8, 5, sizes=(2, 1, 1), repeats=2),
            ((4, 5), (2, 5), (2, 5)),
            1,
            id="interleaved QKV",
        ),
        pytest.param(
            MatrixSpec(3, 6, dim=1, sizes=(2, 2, 2)), ((3, 2),) * 3, 1, id="experts side by side"
        ),
        pytest.param(MatrixSpec(3, 6, dim=1, sizes=(6,)), ((3, 6),), 1, id="one part is the whole"),
    ],
)
def test_matrices_when_given_an_example_then_shapes_and_blocks_are_these(
    spec: MatrixSpec, shapes: tuple[tuple[int, int], ...], num_blocks: int
) -> None:
    assert spec.shapes == shapes
    assert len(spec.blocks) == num_blocks


@given(spec=specs())
def test_blocks_when_taken_together_then_they_tile_the_param_and_hold_each_matrix_once(
    spec: MatrixSpec,
) -> None:
    blocks = spec.blocks
    assert [block.in_param.start for block in blocks] == [
        0,
        *(block.in_param.stop for block in blocks[:-1]),
    ]
    assert blocks[-1].in_param.stop == spec.numel
    assert tuple(shape for block in blocks for shape in block.shapes) == spec.shapes
    for block in blocks:
        assert block.in_param.numel == sum(map(math.prod, block.shapes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"cols": 0},
        {"dim": 2},
        {"repeats": 0},
        {"sizes": (3, 0, 1)},
        {"sizes": (3, 2)},
        {"sizes": (2,), "repeats": 3},
        {"dim": 1, "sizes": (4,)},
    ],
    ids=str,
)
def test_matrices_when_their_sizes_do_not_fit_then_refused(wrong: dict[str, Any]) -> None:
    MatrixSpec(4, 5)
    with pytest.raises(LayoutError):
        MatrixSpec(**{"rows": 4, "cols": 5, **wrong})


def test_matrices_when_of_a_param_then_one_for_each_index_before_the_last_two() -> None:
    assert MatrixSpec.of(ParamSpec("w", 6, (2, 3))).shapes == ((2, 3),)
    experts = MatrixSpec.of(ParamSpec("w", 24, (4, 2, 3)))
    assert experts.shapes == ((2, 3),) * 4
    assert len(experts.blocks) == 4
    with pytest.raises(LayoutError, match="'bias'"):
        MatrixSpec.of(ParamSpec("bias", 6, (6,)))


@given(spec=specs(), data=st.data())
def test_pieces_when_of_a_stretch_then_each_of_its_elements_once_with_its_matrix(
    spec: MatrixSpec, data: st.DataObject
) -> None:
    ends = st.integers(0, spec.numel)
    start, stop = sorted((data.draw(ends), data.draw(ends)))
    sizes = spec.sizes * spec.repeats
    owners = [number % len(spec.sizes) for number, size in enumerate(sizes) for _ in range(size)]
    found = {}
    for piece in spec.pieces(Span(start, stop)):
        assert math.prod(piece.sizes) == piece.in_param.numel
        for row in range(piece.inside.offsets[0], piece.inside.stops[0]):
            for col in range(piece.inside.offsets[1], piece.inside.stops[1]):
                element = piece.in_param.start + row * piece.sizes[1] + col
                assert element not in found
                found[element] = piece.matrix
    place = 0 if spec.dim == 0 else 1
    assert found == {
        number: owners[divmod(number, spec.cols)[place]] for number in range(start, stop)
    }
