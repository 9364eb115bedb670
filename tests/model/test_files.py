"""Model files: what is missing, where it could come from, and what to do about it."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from rows import each_row

from rlx.errors import EnvironmentFault, SpecError
from rlx.model import build_policy
from rlx.model.files import check_model_files, compute_model_fingerprint
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


# Folders -----------------------------------------------------------------------------------------


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


# What only the loaded libraries can tell ---------------------------------------------------------


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


# The hub -----------------------------------------------------------------------------------------

ASK = """
import json, sys
from rlx.errors import RlxError
from rlx.model.files import check_model_files, model_folder
from rlx.spec import PretrainedModelSpec
said = {}
for name in sys.argv[2:]:
    path, _, revision = name.partition("@")
    try:
        done = globals()[sys.argv[1]](PretrainedModelSpec(path=path, revision=revision or None))
        said[name] = [0, str(done)]
    except RlxError as error:
        said[name] = [error.exit_code, str(error)]
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
print(json.dumps({"said": said, "heavy": heavy}))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a model needs: what it holds, and its files."""

    files: Path
    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        _, *parts = self.path.split("?")[0].split("/")
        if parts[:2] == ["api", "models"]:
            self._tell(parts[3], parts[4:])
        elif parts[2:3] == ["resolve"] and (self.files / parts[4]).is_file():
            self._answer(200, (self.files / parts[4]).read_bytes(), ETag=f'"{parts[4]}"')
        else:
            self._answer(404, b"", X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def _tell(self, name, rest):
        refusals = {
            "secret": (401, "RepoNotFound"),
            "gated": (403, "GatedRepo"),
            "nobody": (404, "RepoNotFound"),
            "ill": (500, "Ill"),
        }
        if name in refusals:
            code, reason = refusals[name]
            return self._answer(code, b"{}", X_Error_Code=reason)
        if "lost" in rest:
            return self._answer(404, b"{}", X_Error_Code="RevisionNotFound")
        names = ["README.md"] if name == "empty" else [f.name for f in self.files.iterdir()]
        if "tree" in rest:
            sizes = {n: (self.files / n).stat().st_size for n in names}
            told = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()]
        else:
            siblings = [{"rfilename": n} for n in [*names, "pytorch_model.bin"]]
            siblings = siblings[: len(names)] if name == "empty" else siblings
            told = {"id": f"org/{name}", "sha": COMMIT, "siblings": siblings}
        return self._answer(200, json.dumps(told).encode())

    def _answer(self, code, body, **headers):
        self.send_response(code)
        for key, value in {"X_Repo_Commit": COMMIT, **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(saved):
    kind = type("Hub", (Hub,), {"files": saved, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind.asked
        server.shutdown()


def ask(function, names, cache, **environment):
    """Asks in a process of its own: the hub's client reads the environment when it starts."""
    cleared = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK, function, *names],
        env={**cleared, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["heavy"] == []
    return answer["said"]


def test_the_hubs_refusals_are_told_apart(hub, tmp_path):
    url, _ = hub
    expected = {
        "org/secret": "'org/secret' is not visible on the hub; check the spelling",
        "org/nobody": "'org/nobody' is not visible on the hub; check the spelling",
        "org/gated": "accept its terms",
        "org/model@lost": "the hub has no 'org/model' at revision 'lost'",
        "org/ill": "try again later",
        "org/empty": "has no config.json and no weights",
    }
    said = ask("check_model_files", [*expected, "org/model"], tmp_path, HF_ENDPOINT=url)
    assert said.pop("org/model") == [0, "None"]
    for name, (code, message) in said.items():
        assert code == 4
        assert expected[name] in message
        assert message.startswith("model.path: ")
        assert "\n" not in message


def test_without_a_network(tmp_path):
    closed = "http://127.0.0.1:9"
    said = ask("check_model_files", ["org/model"], tmp_path, HF_ENDPOINT=closed)
    code, message = said["org/model"]
    assert code == 4
    assert "the hub cannot be reached" in message
    assert "`hf download org/model`" in message


def test_a_model_is_fetched_once_and_then_found(hub, tmp_path):
    url, asked = hub
    ((code, folder),) = ask("model_folder", ["org/model"], tmp_path, HF_ENDPOINT=url).values()
    assert code == 0, folder
    assert (Path(folder) / "model.safetensors").is_file()
    assert not (Path(folder) / "pytorch_model.bin").exists()
    asked.clear()
    for environment in ({"HF_ENDPOINT": url}, {"HF_HUB_OFFLINE": "1"}):
        for function in ("model_folder", "check_model_files"):
            ((code, _),) = ask(function, ["org/model"], tmp_path, **environment).values()
            assert code == 0
    assert [path for path in asked if "org/model" in path] == []

    (Path(folder) / "tokenizer.json").unlink()
    said = ask("check_model_files", ["org/model"], tmp_path, HF_HUB_OFFLINE="1")
    assert "lacks tokenizer (tokenizer.json) of 'org/model'" in said["org/model"][1]
