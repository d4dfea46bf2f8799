"""A genai folder runs on the device that is named or chosen, in the decode loop and in onnxruntime-genai."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from genai_folders import CONTEXT, edit_config, greedy_tokens, write_folder, write_tokenizer

import rlx_ort.genai
from rlx_ort import CompileOptions, Device, DevicePolicy, PlacementRule
from rlx_ort.errors import ConversionError, EngineError, InputError, NoViableDeviceError, RunError

PROMPT = [3, 14, 15, 9, 2, 6]
HALF_PROMPT = [2, 6, 3, 14]
ASSISTED = CompileOptions(placement=PlacementRule.ASSISTED)
HAS_GENAI = importlib.util.find_spec("onnxruntime_genai") is not None
with_genai = pytest.mark.skipif(not HAS_GENAI, reason="onnxruntime-genai is not installed; nox --session genai has it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that was made for the CPU."""
    return write_folder(tmp_path_factory.mktemp("genai") / "model")


@pytest.fixture(scope="module")
def half_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the same model in f16."""
    return write_folder(tmp_path_factory.mktemp("genai") / "half", half=True)


@pytest.fixture(params=["rlx_ort", pytest.param("genai", marks=with_genai)])
def engine(request: pytest.FixtureRequest) -> str:
    """Return each engine that is here."""
    return str(request.param)


def test_a_folder_made_for_the_cpu_gives_the_right_tokens_everywhere(folder: Path, device: Device, engine: str) -> None:
    """The tokens are those of the float64 reference. CUDA needs help with attention in f32."""
    with rlx_ort.genai.open(folder, device=device, engine=engine, options=ASSISTED) as model:
        assert model.chosen.device == device
        assert model.engine == engine
        assert list(model.generate(PROMPT, 40)) == greedy_tokens(PROMPT, 40)


def test_an_f16_folder_gives_the_right_tokens(half_folder: Path, device: Device, engine: str) -> None:
    """In the dtype of a GPU's attention, the device that was named computes every float."""
    if needs_f32(half_folder, device):
        pytest.skip("the device does not compute in f16")
    with rlx_ort.genai.open(half_folder, device=device, engine=engine) as model:
        assert list(model.generate(HALF_PROMPT, 20)) == greedy_tokens(HALF_PROMPT, 20, gap=0.05)


def needs_f32(folder: Path, device: Device) -> bool:
    """Return whether a device refuses the nodes of an f16 model."""
    [row] = rlx_ort.genai.rank(folder, device=device).candidates
    return "f16" in (row.blocker or "")


def test_the_decode_loop_shows_where_the_nodes_are(folder: Path, half_folder: Path, device: Device) -> None:
    """Every node that computes with floats is on the device; what the CPU keeps computes the mask."""
    taken = folder if needs_f32(half_folder, device) else half_folder
    with rlx_ort.genai.open(taken, device=device, engine="rlx_ort") as model:
        placement = model.placement
        assert placement is not None
        of_integers = {"ReduceSum", "Shape", "ConstantOfShape", "Unsqueeze", "MatMul", "Squeeze", "Sub", "Cast"}
        assert {node.op_type for node in placement.strays} <= of_integers
        assert model.chosen.cpu_compute == ()
        assert model.chosen.cpu_nodes == len({node.origin for node in placement.strays})


def test_text_that_begins_like_the_last_one_goes_on_rightly(folder: Path, engine: str) -> None:
    """A conversation grows; tokens are the same whether its beginning was kept or not."""
    with rlx_ort.genai.open(folder, device="cpu", engine=engine) as model:
        first = list(model.generate(PROMPT, 8))
        longer = [*PROMPT, *first, 7, 8]
        assert list(model.generate(longer, 8)) == greedy_tokens(longer, 8)
        other = [*PROMPT[:3], 1]
        assert list(model.generate(other, 8)) == greedy_tokens(other, 8)
        assert list(model.generate(PROMPT, 8)) == first


def test_the_last_token_of_an_answer_counts_in_the_next_one(folder: Path, engine: str) -> None:
    """The last token of an answer has not been run yet when the next prompt goes on from it."""
    begun = [12, 18, 9]
    with rlx_ort.genai.open(folder, device="cpu", engine=engine) as model:
        assert list(model.generate(begun, 2)) == [10, 12]
        for more in ([10, 12, 22, 4, 11, 19], [10, 12, 22, 4, 8, 13], [10, 12, 22, 4, 8, 13, 22]):
            assert list(model.generate(begun + more, 2)) == greedy_tokens(begun + more, 2)


def test_a_text_ends_at_a_stop_token(folder: Path, engine: str) -> None:
    """The stop token is the last one that is given."""
    expected = greedy_tokens(PROMPT, 40)
    stop = expected[5]
    with rlx_ort.genai.open(folder, device="cpu", engine=engine) as model:
        found = list(model.generate(PROMPT, 40, stop_tokens={stop}))
    assert found == expected[: expected.index(stop) + 1]


def test_a_text_ends_where_the_cache_is_full(folder: Path, engine: str) -> None:
    """The cache holds as many tokens as it was made for, at most the context of the model."""
    with rlx_ort.genai.open(folder, device="cpu", engine=engine, max_length=10) as model:
        assert len(list(model.generate(PROMPT))) == 10 - len(PROMPT)
        with pytest.raises(InputError, match="the cache takes 1 to 9"):
            model.generate(range(10))
    with rlx_ort.genai.open(folder, device="cpu", engine=engine) as model:
        assert model.max_length == CONTEXT


def test_the_next_text_ends_the_one_before(folder: Path, engine: str) -> None:
    """The cache holds one text, so that the first cannot go on behind the second."""
    with rlx_ort.genai.open(folder, device="cpu", engine=engine) as model:
        first = model.generate(PROMPT, 8)
        begun = [next(first), next(first)]
        assert list(model.generate(PROMPT, 8))[:2] == begun
        with pytest.raises(RunError, match="another text"):
            next(first)


def test_a_closed_model_ends_its_text_and_writes_no_other(folder: Path, engine: str) -> None:
    """Both are the same error in each engine."""
    model = rlx_ort.genai.open(folder, device="cpu", engine=engine)
    text = model.generate(PROMPT, 8)
    next(text)
    for _ in range(2):
        model.close()
    for later in (text, model.generate(PROMPT, 8)):
        with pytest.raises(RunError, match="the language model is closed"):
            next(later)


def test_a_negative_token_is_refused(folder: Path) -> None:
    """A tokenizer gives one for a letter that it does not know."""
    with (
        rlx_ort.genai.open(folder, device="cpu", engine="rlx_ort") as model,
        pytest.raises(InputError, match="token 1 of the prompt is -1"),
    ):
        model.generate([3, -1])


def test_the_bytes_of_the_cache_are_known_before_it_is_there(folder: Path) -> None:
    """Keys and values of one head of 8 floats, for each token of the cache."""
    with rlx_ort.genai.open(folder, device="cpu", engine="rlx_ort", max_length=32) as model:
        assert model.cache_bytes == 2 * 8 * 4 * 32


def test_tokens_are_streamed_and_cancelled(folder: Path, engine: str) -> None:
    """A task that is cancelled ends the text, and the model writes the next one."""

    async def run(model: rlx_ort.genai.LanguageModel) -> list[int]:
        async def read() -> None:
            async for token in model.stream(PROMPT, 40):
                found.append(token)
                if len(found) == 4:
                    task.cancel()

        found: list[int] = []
        task = asyncio.create_task(read())
        with pytest.raises(asyncio.CancelledError):
            await task
        return [token async for token in model.stream(PROMPT, 6)]

    with rlx_ort.genai.open(folder, device="cpu", engine=engine) as model:
        assert asyncio.run(run(model)) == greedy_tokens(PROMPT, 6)


def test_the_ranking_has_every_device_with_its_reason(folder: Path) -> None:
    """Those that may be chosen come first, by the predicted time of prompt and answer."""
    choice = rlx_ort.genai.rank(folder, DevicePolicy(), prompt_tokens=20, new_tokens=10)
    assert choice.ranked[0].device == Device.CPU
    times = [row.total_ns for row in choice.ranked if row.total_ns is not None]
    assert times == sorted(times)
    for row in choice.ranked:
        assert row.prefill_ns is not None
        assert row.step_ns is not None
        assert row.total_ns == pytest.approx(row.prefill_ns + 10 * row.step_ns)
    assert all(row.blocker for row in choice.candidates if row not in choice.ranked)


def test_variants_are_ranked_together(tmp_path: Path) -> None:
    """Of two that are equally fast, the one made for the device is taken; one that cannot be read is listed."""
    write_folder(tmp_path / "a-cuda", providers=[{"cuda": {}}])
    write_folder(tmp_path / "b-cpu")
    write_folder(tmp_path / "c-broken", providers=[{"cdua": {}}])
    with rlx_ort.genai.open(tmp_path, DevicePolicy(allow=(Device.CPU,)), engine="rlx_ort") as model:
        assert model.chosen.variant == "b-cpu"
        assert list(model.generate(PROMPT, 5)) == greedy_tokens(PROMPT, 5)
    [(name, reason)] = model.choice.unreadable
    assert name == "c-broken"
    assert "'cuda'" in reason


def test_a_device_or_engine_that_is_not_here_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that was named, by an argument or by the variable, is used, or the reason is given."""
    with pytest.raises(InputError, match="auto, genai, rlx_ort"):
        rlx_ort.genai.open(folder, engine="own")
    with pytest.raises(NoViableDeviceError, match="rocm: "):
        rlx_ort.genai.open(folder, device="rocm")
    with pytest.raises(NoViableDeviceError, match="denied"):
        rlx_ort.genai.open(folder, DevicePolicy(deny=(Device.CPU,)), device="cpu")
    monkeypatch.setenv("RLX_DEVICE", "rocm")
    with pytest.raises(NoViableDeviceError, match="rocm: "):
        rlx_ort.genai.open(folder)


@pytest.mark.webgpu
def test_the_strict_rule_refuses_the_cpus_help(folder: Path) -> None:
    """By default masks may stay on the CPU; under the strict rule nothing may."""
    with pytest.raises(NoViableDeviceError, match="ReduceSum"):
        rlx_ort.genai.open(folder, device="webgpu", options=CompileOptions(placement=PlacementRule.STRICT))


@pytest.mark.webgpu
def test_a_device_that_was_named_computes_every_float(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention would be left to the CPU, the device is refused unless the caller allows that."""
    from rlx_ort.genai import choice

    def as_if_refused(graph: object, nodes: frozenset[int]) -> tuple[str, ...]:
        return ("attention",)

    monkeypatch.setattr(choice, "_compute", as_if_refused)
    with pytest.raises(NoViableDeviceError, match=r"'attention'.*ASSISTED"):
        rlx_ort.genai.open(folder, device="webgpu")
    assert rlx_ort.genai.rank(folder, options=ASSISTED, device="webgpu").best().cpu_compute == ("attention",)


def test_more_tokens_than_the_context_cannot_be_ranked(folder: Path) -> None:
    """The message has the context of the model."""
    with pytest.raises(InputError, match="at most 64"):
        rlx_ort.genai.rank(folder, prompt_tokens=60, new_tokens=10)


@pytest.mark.skipif(HAS_GENAI, reason="onnxruntime-genai is installed")
def test_without_the_package_the_reason_is_in_the_ranking(folder: Path) -> None:
    """The decode loop is used, and asking for onnxruntime-genai is an error."""
    row = rlx_ort.genai.rank(folder, device="cpu").best()
    assert row.engines == ("rlx_ort",)
    assert "not installed" in row.not_genai
    with pytest.raises(NoViableDeviceError, match="onnxruntime-genai is not installed"):
        rlx_ort.genai.open(folder, device="cpu", engine="genai")


@with_genai
def test_onnxruntime_genai_is_preferred_where_it_can(folder: Path) -> None:
    """The model of that package is there for what this class does not do."""
    with rlx_ort.genai.open(folder, device="cpu") as model:
        assert model.engine == "genai"
        assert model.og_model.type == "llama"
    row = rlx_ort.genai.rank(folder, options=CompileOptions(low_memory=True), device="cpu").best()
    assert row.engines == ("rlx_ort",)
    assert "low_memory" in row.not_genai


@with_genai
def test_onnxruntime_genai_takes_threads_and_the_strict_rule(folder: Path) -> None:
    """Of the options it has threads, and nothing is left to leave to the CPU."""
    strict = CompileOptions(placement=PlacementRule.STRICT, intra_op_threads=1)
    with rlx_ort.genai.open(folder, device="cpu", engine="genai", options=strict) as model:
        assert list(model.generate(PROMPT, 5)) == greedy_tokens(PROMPT, 5)


@with_genai
@pytest.mark.webgpu
def test_onnxruntime_genai_refuses_what_it_would_leave_to_the_cpu(folder: Path) -> None:
    """Under the strict rule it does not fall back, whatever was judged before."""
    from rlx_ort.genai.config import read_config
    from rlx_ort.genai.package import GenaiEngine

    strict = CompileOptions(placement=PlacementRule.STRICT)
    with pytest.raises(EngineError, match="fallback to CPU EP has been explicitly disabled"):
        GenaiEngine(read_config(folder), Device("webgpu"), strict, 32)


def test_links_lead_into_trusted_folders_only(folder: Path, tmp_path: Path, engine: str) -> None:
    """The layout of Hugging Face's cache: config, model and data are links into a folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    write_folder(blobs)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        try:
            (snapshot / file.name).symlink_to(file.rename(blobs / f"{number:040x}"))
        except OSError as err:
            pytest.skip(f"no symbolic links here: {err}")
    with pytest.raises(ConversionError, match="trusted_links"):
        rlx_ort.genai.open(snapshot, engine=engine)
    with rlx_ort.genai.open(snapshot, device="cpu", engine=engine, trusted_links=blobs) as model:
        assert list(model.generate(PROMPT, 5)) == greedy_tokens(PROMPT, 5)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    """Without tokenizer.json the message asks for tokens."""
    with (
        rlx_ort.genai.open(write_folder(tmp_path), device="cpu", engine="rlx_ort") as model,
        pytest.raises(ConversionError, match=r"no tokenizer\.json"),
    ):
        model.generate("text")


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed")
def test_text_goes_through_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt may be a text, and the tokens become one piece by piece."""
    from rlx_ort.genai import tokens
    from rlx_ort.providers.engine.runtime import Problem

    write_tokenizer(write_folder(tmp_path))
    monkeypatch.setattr(tokens.runtime, "genai_problem", lambda: Problem("not here", ""))
    with rlx_ort.genai.open(tmp_path, device="cpu", engine="rlx_ort") as model:
        assert model.tokenizer.encode("cab") == [2, 0, 1]
        assert list(model.generate("cab", 5)) == greedy_tokens([2, 0, 1], 5)
        assert "".join(map(model.tokenizer.pieces(), [2, 0, 1])) == "cab"


def test_an_input_that_no_decoder_of_text_has_is_refused(tmp_path: Path) -> None:
    """The model's mask has another name than the config says."""
    edit_config(write_folder(tmp_path, inputs={"attention_mask": "mask"}))
    with pytest.raises(ConversionError, match=r"'attention_mask', which genai_config\.json does not name"):
        rlx_ort.genai.open(tmp_path, device="cpu")
