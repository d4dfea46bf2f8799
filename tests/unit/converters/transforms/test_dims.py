"""Sizes for open dims: where they go, what follows from them, and what is refused."""

from __future__ import annotations

import pytest
from onnx_text import parsed

from rlx_ort.converters.bundle import ModelBundle, bundle_of
from rlx_ort.converters.transforms.dims import set_dims
from rlx_ort.errors import ConversionError


def model() -> ModelBundle:
    takes, gives = "float[n, m] x, float[n, 3] b, float[?, 4] u", "float[p, q] y, float[?, 4] v"
    body = "h = Concat <axis=1> (x, b) y = Relu (h) v = Neg (u)"
    return bundle_of(parsed(f"({takes}) => ({gives}) {{ {body} }}"))


def shapes(bundle: ModelBundle) -> dict[str, list[int | str]]:
    graph = bundle.proto.graph
    return {
        value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output, *graph.value_info)
    }


def test_a_named_dim_gets_its_size_everywhere_and_shapes_follow() -> None:
    """The columns of both inputs add up in what is between and in the output."""
    made, report = set_dims(model(), {"n": 2, "m": 5})
    found = shapes(made)
    assert (found["x"], found["b"], found["h"], found["y"]) == ([2, 5], [2, 3], [2, 8], [2, 8])
    assert (report.sizes, report.still_open) == ({"n": 2, "m": 5}, ("u[0]",))
    assert shapes(model())["x"] == ["n", "m"]


def test_a_dim_without_a_name_is_addressed_by_its_place() -> None:
    """So is a named one, which then gets the size everywhere."""
    found = shapes(set_dims(model(), {"u[0]": 7, "b[0]": 2})[0])
    assert (found["u"], found["v"], found["x"]) == ([7, 4], [7, 4], [2, "m"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"nn": 2}, "the model has no dim 'nn' in its inputs; did you mean 'n'"),
        ({"n": 0}, "dim 'n' is given size 0; a size is 1 or more"),
        ({"x[2]": 2}, r"'x\[2\]': input 'x' has 2 dims, counted from 0"),
        ({"b[1]": 4}, r"'b\[1\]' is given size 4, and is 3 in the model"),
        ({"w[0]": 4}, r"has no dim 'w\[0\]' in its inputs"),
    ],
)
def test_a_dim_that_cannot_be_set_is_refused(sizes: dict[str, int], message: str) -> None:
    """The message names the dim as it was given."""
    with pytest.raises(ConversionError, match=message):
        set_dims(model(), sizes)


def test_sizes_that_the_model_does_not_take_are_refused() -> None:
    """A product needs the same inner size on both sides."""
    source = bundle_of(parsed("(float[n, k] a, float[j, 2] b) => (float[n, 2] y) { y = MatMul (a, b) }"))
    assert shapes(set_dims(source, {"k": 3, "j": 3})[0])["a"] == ["n", 3]
    with pytest.raises(ConversionError, match=r"the model does not take k=3, j=4: .*MatMul"):
        set_dims(source, {"k": 3, "j": 4})


@pytest.mark.parametrize("declared", ["n, 25", ""])
def test_shapes_that_a_file_declares_for_other_sizes_are_inferred_anew(declared: str) -> None:
    """The text recogniser of PP-OCRv2 declares the 25 places of pictures that are 100 wide, PLCMOS a scalar."""
    source = bundle_of(parsed(f"(float[n, k] a) => (float[{declared}] y) {{ y = Concat <axis = 1> (a, a) }}"))
    assert shapes(set_dims(source, {"n": 2, "k": 20})[0])["y"] == [2, 40]
