"""Model files: what is missing, where it could come from, and what to do about it."""

import json
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from huggingface_hub import errors as hub_errors
from rows import each_row

from rlx.errors import EnvironmentFault, SpecError
from rlx.model import build_policy
from rlx.model.files import check_model_files, compute_model_fingerprint, model_folder
from rlx.spec import PretrainedModelSpec

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("saved"), "qwen2", "chatml")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to break; weights are linked, not copied."""
    for file in saved.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    return tmp_path


def rewrite(file, **changes):
    said = {**json.loads(file.read_text()), **changes}
    file.unlink()
    file.write_text(json.dumps({k: v for k, v in said.items() if v is not None}))


def cut(file, size):
    content = file.read_bytes()[:size]
    file.unlink()
    file.write_bytes(content)


def test_a_path_may_begin_with_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    check_model_files(PretrainedModelSpec(path=f"~/{folder.name}"))
    with pytest.raises(EnvironmentFault, match="there is no folder '~nobody-here/m'"):
        check_model_files(PretrainedModelSpec(path="~nobody-here/m"))


@each_row(
    ("path", "complaint"),
    [
        ("/nowhere/at/all", "no folder '/nowhere/at/all' on this machine; give a folder"),
        ("./nowhere", "no folder './nowhere' on this machine"),
        ("~/no such model", "no folder '~/no such model'"),
        (__file__, "is a file, but no .gguf file; give a GGUF file, or the folder"),
    ],
)
def test_a_path_that_leads_nowhere(path, complaint):
    with pytest.raises(EnvironmentFault, match=complaint) as caught:
        check_model_files(PretrainedModelSpec(path=path))
    assert str(caught.value).startswith("model.path: ")


@pytest.mark.parametrize(
    ("lost", "complaint"),
    [
        (["config.json"], r"no config\.json; give"),
        (["model.safetensors"], r"no weights \(model\.safetensors\); give"),
        (["tokenizer.json"], r"no tokenizer \(tokenizer\.json\); give"),
        (["config.json", "model.safetensors"], r"no config\.json and no weights"),
    ],
)
def test_what_a_folder_lacks_is_named(folder, lost, complaint):
    for name in lost:
        (folder / name).unlink()
    with pytest.raises(EnvironmentFault, match=complaint):
        check_model_files(PretrainedModelSpec(path=str(folder)))


def test_a_lost_part_of_the_weights_is_named(folder):
    whole = folder / "model.safetensors"
    parts = {f"p{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    whole.rename(folder / parts["p1"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(EnvironmentFault, match=r"it has no model-00002-of-00002\.safetensors"):
        check_model_files(PretrainedModelSpec(path=str(folder)))


@pytest.mark.parametrize("size", [0, 5, 200, 20_000])
def test_damaged_weights_are_found_without_reading_them(folder, size):
    cut(folder / "model.safetensors", size)
    with pytest.raises(EnvironmentFault, match=r"model\.safetensors' are damaged .*again"):
        check_model_files(PretrainedModelSpec(path=str(folder)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_kinds_that_cannot_be_trained(folder, changes, complaint):
    rewrite(folder / "config.json", **changes)
    with pytest.raises(SpecError, match=complaint):
        check_model_files(PretrainedModelSpec(path=str(folder)))


def test_a_revision_of_a_folder_is_refused(folder):
    with pytest.raises(SpecError, match=r"model\.revision"):
        check_model_files(PretrainedModelSpec(path=str(folder), revision="main"))


def test_other_files_have_another_fingerprint(folder):
    spec = PretrainedModelSpec(path=str(folder))
    before = compute_model_fingerprint(spec)
    assert compute_model_fingerprint(spec) == before
    cut(folder / "tokenizer.json", 100)
    assert compute_model_fingerprint(spec) != before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "ours", "auto_map": {"AutoConfig": "ours.Config"}}, "which rlx never runs"),
        ({"model_type": "ours"}, "has model type 'ours', which transformers .* does not support"),
        ({"model_type": None}, "has model type None,"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "t5", "architectures": None}, "t5"),
    ],
)
def test_models_of_other_kinds(folder, changes, complaint):
    rewrite(folder / "config.json", **changes)
    with pytest.raises(SpecError, match=rf"model\.path: .*{complaint}"):
        build_policy(PretrainedModelSpec(path=str(folder)), 0)


def test_code_in_the_folder_is_not_run(folder):
    (folder / "ours.py").write_text("raise SystemExit('it ran')")
    rewrite(folder / "config.json", auto_map={"AutoModelForCausalLM": "ours.Model"})
    assert build_policy(PretrainedModelSpec(path=str(folder)), 0).model.config.model_type == "qwen2"


def test_weights_of_another_shape(folder):
    rewrite(folder / "config.json", hidden_size=128)
    with pytest.raises(EnvironmentFault, match="cannot load"):
        build_policy(PretrainedModelSpec(path=str(folder)), 0)


def test_weights_that_are_not_there_are_never_made_up(folder):
    rewrite(folder / "config.json", num_hidden_layers=3, layer_types=None)
    with pytest.raises(EnvironmentFault, match=r"lack \d+ of the model's parameters, such as"):
        build_policy(PretrainedModelSpec(path=str(folder)), 0)


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """A hub that holds org/model; returns the names of the calls that it got."""
    called = []

    def list_files(_, path, **__):
        called.append("list")
        names = [*(file.name for file in saved.iterdir()), "pytorch_model.bin"]
        names = ["README.md"] if path == "org/empty" else names
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    def fetch(path, *, revision, allow_patterns):
        called.append("fetch")
        folder = tmp_path / f"models--{path.replace('/', '--')}"
        snapshot = folder / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for file in saved.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                (snapshot / file.name).hardlink_to(file)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", list_files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    return called


@each_row(
    ("error", "status", "hint"),
    [
        ("RepositoryNotFoundError", 401, "not visible on the hub; check the spelling"),
        ("RepositoryNotFoundError", 404, "not visible on the hub; check the spelling"),
        ("GatedRepoError", 403, "accept its terms"),
        ("RevisionNotFoundError", 404, "the hub has no 'org/model' at revision 'v1'"),
        ("HfHubHTTPError", 500, "try again later"),
        ("OfflineModeIsEnabled", None, "be reached (why); give a local folder, or fetch it where"),
    ],
)
def test_the_hubs_refusals_are_told_apart(hub, monkeypatch, error, status, hint):
    def refuse(*_, **__):
        answer = SimpleNamespace(headers={}, request=None, status_code=status)
        options = {} if status is None else {"response": answer}
        raise getattr(hub_errors, error)("why\nand more", **options)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(EnvironmentFault) as refused:
        check_model_files(PretrainedModelSpec(path="org/model", revision="v1"))
    message = str(refused.value)
    assert message.startswith("model.path: ") and hint in message and "\n" not in message


def test_a_name_that_holds_no_model_is_refused(hub):
    with pytest.raises(EnvironmentFault, match=r"has no config\.json and no weights"):
        check_model_files(PretrainedModelSpec(path="org/empty"))


def test_a_model_is_fetched_once_and_then_found(hub, monkeypatch):
    spec = PretrainedModelSpec(path="org/model")
    check_model_files(spec)
    assert hub == ["list"], "a check fetches nothing"
    folder = model_folder(spec)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        f.name for f in folder.iterdir()
    }
    hub.clear()
    assert model_folder(spec) == folder
    check_model_files(spec)
    assert hub == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_folder(spec) == folder
    (folder / "tokenizer.json").unlink()
    for path, lacks in (("org/model", "tokenizer (tokenizer.json)"), ("org/other", "every file")):
        with pytest.raises(EnvironmentFault) as refused:
            check_model_files(PretrainedModelSpec(path=path))
        assert f"the hub's cache lacks {lacks} of '{path}', and HF_HUB_OFFLINE is set" in str(
            refused.value
        )
        assert f"`hf download {path}`" in str(refused.value)
