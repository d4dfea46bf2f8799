"""`DecodeLoop` on every device: its tokens, its memory, and what it does when something is wrong."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sample_models.decoders import DECODER, FORMS, build

from rlx_ort import CompileOptions, DecodeLoop, Device, DType, Graph, GraphDevices, PlacementRule, Session, limited
from rlx_ort.errors import EngineError, InputError, LegalizeError, RunError, TimeLimitError
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.engine.ort_binding import OrtBinder

PROMPT = np.random.default_rng(7).integers(0, DECODER.vocabulary, (1, 6))
EXPECTED = DECODER.tokens(PROMPT, 12)


def compiled(device: Device | str, form: str) -> Any:
    """Return the decoder; a device may leave the arithmetic of lengths to the CPU."""
    try:
        return Session(device, CompileOptions(placement=PlacementRule.ASSISTED)).compile(build(form=form))
    except LegalizeError as err:
        if form != "scatter":  # ONNX Runtime 1.24 has no TensorScatter
            raise
        pytest.skip(str(err))


def drawn(loop: DecodeLoop, prompt: Any = PROMPT, count: int = 12) -> Any:
    return np.stack(list(loop.generate(prompt, count)), axis=1)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_a_float64_reference(device: Device, form: str) -> None:
    """Prompt and steps choose the tokens that float64 arithmetic over the whole text chooses."""
    loop = DecodeLoop(compiled(device, form), 32)
    np.testing.assert_array_equal(drawn(loop), EXPECTED)
    assert loop.length == 6 + 11


@pytest.mark.parametrize("form", FORMS)
def test_without_sharing_memory_the_tokens_are_the_same(device: Device, form: str) -> None:
    """A cache that is made anew in each run gives the same tokens."""
    loop = DecodeLoop(compiled(device, form), 32, in_place=False)
    np.testing.assert_array_equal(drawn(loop), EXPECTED)
    assert loop.in_place is False


@pytest.mark.parametrize(("form", "shared"), [("cached", True), ("masked", True), ("scatter", True), ("concat", False)])
def test_the_cache_is_written_in_place_where_the_graph_allows_it(form: str, shared: bool) -> None:
    """Attention over a buffer shares it; a concatenation needs new memory."""
    loop = DecodeLoop(compiled("cpu", form), 32)
    assert loop.in_place is None
    loop.prefill(PROMPT)
    assert loop.in_place is shared


def test_a_cache_that_something_else_reads_is_not_written_in_place() -> None:
    """A second reader of the past keys would see the new ones, so they get memory of their own."""
    graph = build(form="cached")
    keys = next(value for value in graph.inputs if value.name == "keys0")
    graph.set_outputs([*graph.outputs, keys.sum([0, 1, 2, 3])], [*graph.output_names, "total"])
    loop = DecodeLoop(Session("cpu").compile(graph), 32, cache={"keys0": "new_keys0"})
    np.testing.assert_array_equal(drawn(loop), EXPECTED)
    assert loop.in_place is False


@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_fails_ends_the_sequences_where_it_spoils_the_session(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on OpenVINO: no later step runs there, and the next prompt is answered by another session."""
    sound, lock = CpuProvider.recipe, threading.RLock()

    def spoiled(self: Any, device: Device, options: Any) -> Any:
        return replace(sound(self, device, options), run_lock=lambda: lock, spoiled_by_errors=True)

    monkeypatch.setattr(CpuProvider, "recipe", spoiled)
    decoder = compiled("cpu", form)
    loop = DecodeLoop(decoder, 32)
    loop.prefill(PROMPT)
    first = decoder.engine()
    with pytest.raises(EngineError):
        loop.step([DECODER.vocabulary])
    assert loop.length == 0
    np.testing.assert_array_equal(drawn(loop), EXPECTED)
    assert decoder.engine() is not first


def test_an_engine_that_loses_tokens_in_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A binding whose outputs do not reach the shared memory gives other logits in the trial, and is not used."""
    bound = OrtBinder.bound

    def lossy(self: Any, inputs: Any, outputs: Any) -> Any:
        return bound(self, inputs, {name: place for name, place in outputs.items() if not isinstance(place, str)})

    monkeypatch.setattr(OrtBinder, "bound", lossy)
    loop = DecodeLoop(compiled("cpu", "cached"), 32)
    np.testing.assert_array_equal(drawn(loop), EXPECTED)
    assert loop.in_place is False


def test_a_step_may_differ_from_a_run_of_several_tokens(device: Device) -> None:
    """Kernels for one row round otherwise than those for several; the cache is shared all the same."""
    graph = build(form="cached")
    (shape,) = graph.onnx_node("Shape", [graph.inputs[0]], types=[TensorType(DType.I64, Shape([2]))])
    new = graph.gather(shape, np.array(1, np.int64)).cast("f32")
    several = graph.minimum(new - np.float32(1), np.float32(1))
    logits, *cache = graph.outputs
    graph.set_outputs([logits * (np.float32(1) + several * np.float32(0.05)), *cache], graph.output_names)
    several_rows = Session(device, CompileOptions(placement=PlacementRule.ASSISTED)).compile(graph)
    loop = DecodeLoop(several_rows, 32)
    np.testing.assert_array_equal(drawn(loop), EXPECTED)
    plain = DecodeLoop(compiled(device, "cached"), 32)
    plain.prefill(PROMPT)
    assert loop.in_place is plain.in_place  # false where a model is compiled, or attention runs on another device


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_may_be_run_in_chunks(form: str) -> None:
    """Chunks of 4, the last one shorter, give the tokens of the whole prompt."""
    np.testing.assert_array_equal(drawn(DecodeLoop(compiled("cpu", form), 32, chunk=4)), EXPECTED)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_place", [True, False])
def test_two_sequences_go_on_in_chunks(device: Device, form: str, in_place: bool) -> None:
    """GroupQueryAttention takes several tokens behind others for one sequence only, so they are run one by one."""
    texts = np.random.default_rng(9).integers(0, DECODER.vocabulary, (2, 10))
    loop = DecodeLoop(compiled(device, form), 24, batch=2, chunk=3, in_place=in_place)
    loop.prefill(texts[:, :7])
    logits = loop.prefill(texts[:, 7:])
    assert loop.length == 10
    np.testing.assert_array_equal(logits.argmax(-1), DECODER.logits(texts).argmax(-1))


def test_two_sequences_are_decoded_together(device: Device) -> None:
    """Each row of a batch gets the tokens it would get alone."""
    prompts = np.random.default_rng(9).integers(0, DECODER.vocabulary, (2, 5))
    loop = DecodeLoop(compiled(device, "cached"), 24, batch=2)
    np.testing.assert_array_equal(drawn(loop, prompts, 6), DECODER.tokens(prompts, 6))


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_goes_on_from_the_cache(form: str) -> None:
    """A second prompt follows the first answer without running the first again."""
    loop = DecodeLoop(compiled("cpu", form), 40)
    answer = drawn(loop, PROMPT, 4)
    more = np.concatenate([answer[:, -1:], PROMPT[:, :3]], axis=1)
    text = np.concatenate([PROMPT, answer, PROMPT[:, :3]], axis=1)
    np.testing.assert_array_equal(drawn(loop, more, 4), DECODER.tokens(text, 4))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_cut_cache_gives_the_tokens_of_the_shorter_text(device: Device, in_place: bool) -> None:
    """After reset(6) the text is the prompt again."""
    loop = DecodeLoop(compiled(device, "masked"), 32, in_place=in_place)
    drawn(loop, PROMPT, 5)
    loop.reset(6)
    logits = loop.step([int(EXPECTED[0, 0])])
    np.testing.assert_array_equal(logits.argmax(-1), EXPECTED[:, 1])


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_cache_may_be_cut_again(form: str) -> None:
    """reset(8) and reset(6) without a run between them leave the prompt, as does another reset(6)."""
    loop = DecodeLoop(compiled("cpu", form), 32, in_place=False)
    drawn(loop, PROMPT, 5)
    for length in (8, 6, 6):
        loop.reset(length)
    np.testing.assert_array_equal(loop.step(EXPECTED[:, 0]).argmax(-1), EXPECTED[:, 1])


def test_a_loop_begins_anew_after_reset(device: Device) -> None:
    """The second text is not influenced by the first."""
    loop = DecodeLoop(compiled(device, "masked"), 32)
    drawn(loop, PROMPT[:, ::-1], 9)
    loop.reset()
    np.testing.assert_array_equal(drawn(loop), EXPECTED)


def test_steps_allocate_nothing_that_stays() -> None:
    """A hundred steps leave Python's memory as it was."""
    loop = DecodeLoop(Session("cpu").compile(build(form="masked")), 64)
    loop.prefill(PROMPT)
    token = np.array([3])
    for _ in range(3):
        loop.step(token)
    tracemalloc.start()
    try:
        loop.step(token)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            loop.step(token)
        assert tracemalloc.get_traced_memory()[0] - before < 64
    finally:
        tracemalloc.stop()


def test_stop_tokens_end_the_text() -> None:
    """The stop token is the last one."""
    loop = DecodeLoop(compiled("cpu", "cached"), 32)
    stop = int(EXPECTED[0, 4])
    first = list(EXPECTED[0]).index(stop)
    found = [int(token[0]) for token in loop.generate(PROMPT, 12, stop_tokens={stop})]
    assert found == EXPECTED[0, : first + 1].tolist()


def test_another_choice_than_the_largest_logit() -> None:
    """A chooser gets the logits of each step and decides."""
    loop = DecodeLoop(compiled("cpu", "cached"), 32)
    least = next(iter(loop.generate(PROMPT, 1, choose=lambda logits: logits.argmin(-1))))
    assert least[0] == DECODER.logits(PROMPT).argmin()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(
    "rows",
    [[[1, 3, 2], [-1, -3, 5]], [[-2, -1, -3], [1, 2, 0]], [[4, 4, 1], [0, 2, 2]], [[-0.0, 0.0, -1], [-4, -3, 0]]],
    ids=["positive", "one negative", "ties", "zeros"],
)
def test_the_largest_logit_is_chosen_in_every_dtype(monkeypatch: Any, rows: list[list[float]], dtype: str) -> None:
    """The first of the largest, as float64 arithmetic finds it."""
    loop = DecodeLoop(compiled("cpu", "cached"), 32, batch=2)
    logits = np.array(rows).astype(DType(dtype).numpy)
    monkeypatch.setattr(DecodeLoop, "prefill", lambda *_: logits)
    np.testing.assert_array_equal(next(loop.generate(PROMPT, 1)), np.array(rows, np.float64).argmax(-1))


def test_generation_ends_where_the_cache_is_full() -> None:
    """A cache of 9 tokens has room for a prompt of 6 and three more, and the token after them is still chosen."""
    loop = DecodeLoop(compiled("cpu", "cached"), 9)
    np.testing.assert_array_equal(drawn(loop, PROMPT, 100), EXPECTED[:, :4])
    with pytest.raises(InputError, match="has 9 of 9"):
        loop.step([0])


def test_the_size_of_the_cache_is_known_before_it_is_allocated() -> None:
    """Two layers of keys and values of 32 tokens, two heads of 16 floats: 16,384 bytes."""
    assert DecodeLoop(compiled("cpu", "masked"), 32).cache_bytes == 16384


@pytest.mark.parametrize("tokens", [[[1.5, 2.0]], [[1, 2], [3, 4]], [], [[[1]]]])
def test_wrong_tokens_are_refused(tokens: Any) -> None:
    """Tokens are integers, a row for each sequence."""
    loop = DecodeLoop(compiled("cpu", "cached"), 32)
    with pytest.raises(InputError, match="prefill takes integers"):
        loop.prefill(np.asarray(tokens))


@pytest.mark.parametrize("tokens", [[1, 2], [1.5], 1, [[1]], []])
def test_wrong_tokens_of_a_step_are_refused(tokens: Any) -> None:
    """A step takes one integer for each sequence, and after an error the text goes on."""
    loop = DecodeLoop(compiled("cpu", "cached"), 32)
    loop.prefill(PROMPT)
    with pytest.raises(InputError, match=r"step takes integers \(1,\)"):
        loop.step(tokens)
    np.testing.assert_array_equal(loop.step(EXPECTED[:, 0]).argmax(-1), EXPECTED[:, 1])


def test_a_step_needs_a_prompt() -> None:
    """Without a prompt there is nothing to continue."""
    with pytest.raises(RunError, match="prefill"):
        DecodeLoop(compiled("cpu", "cached"), 32).step([1])


def test_more_positions_than_the_decoder_has_are_refused() -> None:
    """The rotations of the decoder end at 64."""
    with pytest.raises(InputError, match="64 positions"):
        DecodeLoop(compiled("cpu", "cached"), 65)


def test_a_graph_without_a_cache_is_refused() -> None:
    """The message says what is missing, and what the graph has."""
    graph = Graph("classifier")
    ids = graph.input("input_ids", ["batch", "new"], "i64")
    graph.set_outputs([graph.gather(np.ones((4, 3), np.float32), ids)], ["logits"])
    with pytest.raises(InputError, match="has no cache"):
        DecodeLoop(Session("cpu").compile(graph), 32)


def test_an_unknown_input_is_refused() -> None:
    """A loop does not guess what to feed."""
    graph = build(form="cached")
    extra = graph.input("temperature", [1])
    graph.set_outputs([graph.outputs[0] * extra, *graph.outputs[1:]], graph.output_names)
    with pytest.raises(InputError, match="'temperature'"):
        DecodeLoop(Session("cpu").compile(graph), 32)


def test_tokens_are_streamed_to_asyncio() -> None:
    """`stream` yields what `generate` yields, while other tasks run."""

    async def main() -> list[int]:
        loop = DecodeLoop(compiled("cpu", "masked"), 32)
        return [int(token[0]) async for token in loop.stream(PROMPT, 12)]

    assert asyncio.run(main()) == EXPECTED[0].tolist()


def test_cancelling_a_stream_leaves_the_loop_usable() -> None:
    """The task ends within a step, and the next text is what it would have been."""
    loop = DecodeLoop(compiled("cpu", "masked"), 32)

    async def first_tokens() -> None:
        async for _ in loop.stream(PROMPT, 12):
            await asyncio.sleep(3600)

    async def main() -> None:
        task = asyncio.create_task(first_tokens())
        while not loop.length:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    loop.reset()
    np.testing.assert_array_equal(drawn(loop), EXPECTED)


def test_a_time_limit_ends_a_text() -> None:
    """A step that begins after the limit is not made, and what was yielded before is kept."""
    loop = DecodeLoop(compiled("cpu", "masked"), 32)
    found: list[int] = []

    def text() -> None:
        for token in loop.generate(PROMPT):
            found.append(int(token[0]))
            time.sleep(0.05)

    with pytest.raises(TimeLimitError):
        limited(text, timeout_s=0.4)
    assert 0 < len(found) < 12
    assert found == EXPECTED[0, : len(found)].tolist()


def test_a_closed_graph_closes_its_loops() -> None:
    """The cache is freed with the session, and the next call says so."""
    graph = compiled("cpu", "cached")
    loop = DecodeLoop(graph, 32)
    loop.prefill(PROMPT)
    graph.close()
    assert loop.length == 0
    with pytest.raises(RunError, match="closed"):
        loop.prefill(PROMPT)


def test_a_closed_runner_closes_the_loops_of_its_graphs() -> None:
    """A loop does not keep a session that the runner has closed."""
    runner = GraphDevices(build(form="cached"))
    loop = DecodeLoop(runner.compile("cpu"), 32)
    loop.prefill(PROMPT)
    runner.close()
    for call in (lambda: loop.step([1]), lambda: loop.prefill(PROMPT)):
        with pytest.raises(RunError, match="closed"):
            call()
    assert loop.length == 0


def test_a_loop_with_tokens_ties_the_graph_to_its_device() -> None:
    """While a cache is in use, its session is not given up for memory, and no other device takes over."""
    graph = compiled("cpu", "cached")
    loop = DecodeLoop(graph, 32)
    assert not graph.has_state
    loop.prefill(PROMPT)
    assert graph.has_state
    assert not graph._state.unbind_idle()
    loop.reset()
    assert graph._state.unbind_idle()


def test_a_memory_budget_does_not_wait_for_a_loop_whose_prompt_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt may wait for a lock of whoever frees memory, so that waiting for it would never end."""
    graph = compiled("cpu", "cached")
    loop = DecodeLoop(graph, 32)
    begun, freed, engine = threading.Event(), threading.Event(), graph.engine

    def slow(user: DecodeLoop) -> Any:
        begun.set()
        freed.wait(20)
        return engine(user)

    monkeypatch.setattr(graph, "engine", slow)
    graph._state.loops.add(loop)
    with ThreadPoolExecutor(2) as pool:
        prompt = pool.submit(loop.prefill, PROMPT)
        begun.wait(20)
        try:
            assert pool.submit(graph._state.unbind_idle).result(timeout=10) is False
        finally:
            freed.set()
        assert prompt.result().shape == (1, DECODER.vocabulary)
    assert loop.length == 6


def test_new_weights_are_used_after_reset() -> None:
    """A text is finished with the weights it began with; the next one has the new weights."""
    graph = compiled("cpu", "cached")
    loop = DecodeLoop(graph, 32)
    first = loop.prefill(PROMPT).copy()
    graph.set_param("out", -DECODER.weights["out"])
    loop.reset()
    np.testing.assert_allclose(loop.prefill(PROMPT), -first, rtol=1e-6)
