"""What SageMaker asks of a container: /ping, /invocations, and how the image starts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloze.image import arguments
from tests.support.route_service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bundle")) as made:
        yield made


def test_invocations_are_requests_of_other_routes(service: Service) -> None:
    for path, body in {
        "/embed": {"inputs": ["the", "of"]},
        "/fill-mask": {"inputs": "a [MASK]", "parameters": {"top_k": 2}},
        "/qa": {"inputs": {"question": "the", "context": "of"}},
        "/v1/embeddings": {"input": "the", "model": "tiny"},
        "/rerank": {"query": "the", "texts": ["of", "the"]},
        "/v1/score": {"text_1": "the", "text_2": ["of", "the"]},
        "/v2/rerank": {"query": "the", "documents": ["of", "the"], "return_documents": False},
    }.items():
        attributes = {"x_amzn_sagemaker_custom_attributes": "c000b4f9", "content_type": "text/csv"}
        answer = service.post("/invocations", body, **attributes)
        assert answer.status_code == 200, answer.text
        found, expected = answer.json(), service.post(path, body).json()
        for name in {"data", "results"} & found.keys() if isinstance(found, dict) else ():
            found, expected = found[name], expected[name]  # an id and a time differ
        assert found == expected, path
    ranked = service.post("/invocations", {"query": "the", "documents": ["of"]}).json()
    assert ranked["results"][0]["document"] == {"text": "of"}
    vectors = service.post("/invocations", {"inputs": "the"}, accept="application/octet-stream")
    assert vectors.headers["x-shape"] == "1,4"


def test_the_image_serves_as_it_is_started(tmp_path: Path) -> None:
    """Each cloud's way to start it; without one, and with arguments, as `cloze serve` does."""

    def started(*given: str, **environment: str) -> tuple[list[str], dict[str, str]]:
        return arguments(given, environment, tmp_path / "model"), environment

    assert started() == (["serve"], {})
    assert started("serve", "--port", "9") == (["serve", "--port", "9"], {})
    assert started("--version") == (["--version"], {})
    assert started("serve") == (["serve"], {"CLOZE_PORT": "8080"})
    assert started("serve", CLOZE_PORT="9")[1]["CLOZE_PORT"] == "9"
    asked = {"SAGEMAKER_BIND_TO_PORT": "7", "CLOZE_PORT": "9"}
    assert started("serve", **asked)[1]["CLOZE_PORT"] == "7"
    vertex = {"AIP_HTTP_PORT": "8", "AIP_HEALTH_ROUTE": "/h", "AIP_PREDICT_ROUTE": "/p"}
    own = {"CLOZE_PORT": "8", "CLOZE_HEALTH_ROUTE": "/h", "CLOZE_PREDICT_ROUTE": "/mine"}
    assert started(CLOZE_PREDICT_ROUTE="/mine", **vertex) == (["serve"], vertex | own)


def test_the_model_of_sagemaker_is_a_store_or_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, environment = tmp_path / "model", {"CLOZE_MODEL_STORE": "/bundles"}
    model.mkdir()
    arguments(["serve"], environment, model)
    assert environment["CLOZE_MODEL_STORE"] == "/bundles", "the folder is empty"
    (model / "mine" / "1").mkdir(parents=True)
    arguments(["serve"], environment, model)
    assert environment["CLOZE_MODEL_STORE"] == str(model)
    manifest = model / "manifest.json"
    manifest.write_text(json.dumps({"name": "mine", "version": 4}))
    arguments(["serve"], environment, model)
    bundle = Path(environment["CLOZE_MODEL_STORE"], "mine", "4")
    assert (bundle / "manifest.json").samefile(manifest)
    for wrong in ("{", "[]", '{"name": "../x", "version": 1}', '{"name": "x", "version": "y"}'):
        manifest.write_text(wrong)
        with pytest.raises(SystemExit) as ended:
            arguments(["serve"], environment, model)
        assert ended.value.code == 2
        assert str(manifest) in capsys.readouterr().err
