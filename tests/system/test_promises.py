"""The seven promises of the design, each broken on purpose, on real server processes."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import openai
import psutil
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from cloze.client import Client, ServerBusy
from tests.support.command import cloze
from tests.support.faulty import (
    BATCHES,
    QUEUED,
    SLOW_TEXTS,
    WORDS,
    Faulty,
    assert_close,
    at_once,
    embed,
    front_ends,
    metric,
    one_process,
    until,
    wait_for_run,
)
from tests.support.refusals import error_of
from tests.support.serving import Server, children, running_server
from tests.support.sources import file_of
from tests.support.waiting import wait_until

both_forms = pytest.mark.parametrize(
    "faulty_server", [one_process, front_ends], ids=["one-process", "front-ends"]
)


def test_1_every_request_is_answered_whatever_happens(tiny_store: Path) -> None:
    """Good, slow, poisonous and oversized requests together: each gets the one answer it should."""
    kinds = {"paris walk": 200, "moon": 200, "sun": 500, "": 400}
    texts = list(kinds) * 8
    with front_ends(tiny_store) as server:
        responses = at_once(server, texts)
        assert [response.status_code for response in responses] == [kinds[text] for text in texts]

        def answered() -> dict[str, float]:
            pattern = (
                r'cloze_requests_total\{model="[^"]*",route="/embed",status="(\d+)",'
                r'version="[^"]*"\} (\S+)'
            )
            found = re.findall(pattern, httpx.get(f"{server.url}/metrics").text)
            return {status: float(count) for status, count in found if float(count)}

        # A front end counts a request after its client has the answer.
        wait_until(lambda: sum(answered().values()) >= len(texts))
        assert answered() == {"200": 16, "500": 8, "400": 8}


def test_1_a_hung_run_costs_only_its_own_request(tiny_store: Path) -> None:
    with one_process(tiny_store, CLOZE_REQUEST_TIMEOUT_MS="700", CLOZE_WORKERS="2") as server:
        with ThreadPoolExecutor(1) as pool:
            hung = pool.submit(embed, server, "tree")
            wait_for_run(server, "tree")
            responses = at_once(server, WORDS)
        assert error_of(hung.result()) == (504, "timeout")
        assert {response.status_code for response in responses} == {200}
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_1_a_request_may_state_its_time_limit(tiny_store: Path) -> None:
    with one_process(tiny_store) as server:
        started = time.monotonic()
        headers = {"x-request-timeout-ms": "300"}
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "river"}, headers=headers)
        assert error_of(answer) == (504, "timeout")
        assert 0.25 < time.monotonic() - started < 2.5
        wait_for_run(server, "river")
        assert embed(server, "walk").status_code == 200


def test_1_a_full_queue_is_each_clients_own_error(tiny_store: Path) -> None:
    with (
        one_process(
            tiny_store, CLOZE_MAX_QUEUE_TOKENS="20", CLOZE_WORKERS="1", CLOZE_MAX_BATCH_TOKENS="1"
        ) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        running = pool.submit(embed, server, "river")
        wait_for_run(server, "river")
        waiting = pool.submit(embed, server, "walk " * 18)
        wait_until(lambda: metric(server, QUEUED) == 20)
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.embeddings.create(model="bert", input="paris")
        with InferenceClient(base_url=server.url) as hub, pytest.raises(HfHubHTTPError) as hubs:
            hub.feature_extraction("paris")
        with Client(server.url, retries=0) as ours, pytest.raises(ServerBusy) as caught:
            ours.embed("paris")
        assert caught.value.code == hubs.value.response.headers["x-error-code"] == "overloaded"
        assert caught.value.retry_after_s is not None
        assert {running.result().status_code, waiting.result().status_code} == {200}


def test_1_work_of_a_client_that_left_is_dropped(tiny_store: Path) -> None:
    with one_process(tiny_store, CLOZE_WORKERS="1", CLOZE_MAX_BATCH_TOKENS="1") as server:
        body = json.dumps({"inputs": ["moon " * n for n in range(1, 101)]}).encode()  # 15 s of work
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
            wait_for_run(server, "moon")
        started = time.monotonic()
        assert embed(server, "paris").status_code == 200
        assert time.monotonic() - started < 3
        wait_until(lambda: metric(server, QUEUED) == 0)
        assert metric(server, BATCHES) < 20
        assert (
            metric(
                server,
                r'cloze_requests_total\{model="bert",route="/embed",status="499",version="1"\}',
            )
            == 1
        )


def test_2_batch_mates_of_a_poisonous_text_get_their_answers(tiny_store: Path) -> None:
    with front_ends(tiny_store, CLOZE_WORKERS="1") as faulty, ThreadPoolExecutor(1) as pool:
        expected = {word: embed(faulty, word).json() for word in WORDS}
        # While these run, the others queue up and share a batch.
        blocker = pool.submit(embed, faulty, "river")
        wait_for_run(faulty, "river")
        texts = [*WORDS, "sun", *WORDS]
        responses = at_once(faulty, texts)
        assert blocker.result().status_code == 200
        for text, response in zip(texts, responses, strict=True):
            if text == "sun":
                assert response.status_code == 500
                assert response.json()["error_type"] == "Backend"
            else:
                np.testing.assert_allclose(response.json(), expected[text], atol=1e-5)
        alone = r'cloze_batch_sequences_bucket\{le="1.0",model="bert",version="1"\}'
        # Some must have shared a batch, or this shows nothing. An engine process counts a batch
        # after its answers.
        wait_until(lambda: metric(faulty, alone) < metric(faulty, BATCHES))
        assert httpx.get(f"{faulty.url}/healthz").status_code == 200


def test_3_batched_equals_single_for_mixed_tasks(server: Server) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    for word in WORDS:
        requests += [
            ("/embed", {"inputs": f"the {word} of"}),
            ("/fill-mask", {"inputs": f"{word} [MASK]"}),
            ("/nsp", {"inputs": {"text": word, "next": "of"}}),
            ("/embed", {"inputs": [f"{word} " * n for n in (1, 5, 5, 30)]}),
        ]

    def post(request: tuple[str, dict[str, Any]]) -> Any:
        response = httpx.post(server.url + request[0], json=request[1], timeout=30)
        assert response.status_code == 200
        return response.json()

    single = [post(request) for request in requests]
    with ThreadPoolExecutor(32) as pool:
        for _ in range(3):
            for batched, alone in zip(pool.map(post, requests), single, strict=True):
                assert_close(batched, alone)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("king", "could not repeat its golden outputs"),
        ("war", "a worker ended with SystemExit"),
        ("tree", "a run took longer than 2."),
    ],
)
def test_4_a_dead_engine_ends_the_process(tiny_store: Path, text: str, reason: str) -> None:
    limits = {"CLOZE_WORKERS": "1", "CLOZE_MAX_BATCH_TOKENS": "1"}
    with one_process(tiny_store, **limits) as server, ThreadPoolExecutor(8) as pool:
        assert embed(server, "paris").status_code == 200  # measures the engine
        guilty = pool.submit(embed, server, text)
        wait_for_run(server, text)
        lengths = (1, 2) if text == "tree" else ()
        queued = [pool.submit(embed, server, "moon " * n) for n in lengths]
        assert guilty.result().status_code in (500, 503)
        assert {future.result().status_code for future in queued} <= {503}
        assert server.process.wait(15) == 1
    assert any(reason in line for line in server.log)


def test_4_an_engine_process_that_dies_is_started_again(tiny_store: Path) -> None:
    """Behind front ends: who waited for a hanging run is told at once, readiness goes and comes
    back, the server lives.
    """
    with (
        front_ends(tiny_store, CLOZE_STALL_TIMEOUT_MS="1500", CLOZE_WORKERS="1") as server,
        ThreadPoolExecutor(8) as pool,
    ):
        assert embed(server, "paris").status_code == 200  # measures the engine
        for run in (1, 2):
            hung = pool.submit(embed, server, "tree")
            wait_for_run(server, "tree", count=run)
            queued = [pool.submit(embed, server, word) for word in WORDS[:4]]
            assert {future.result().status_code for future in (hung, *queued)} == {503}
            assert until(lambda: httpx.get(f"{server.url}/readyz"), 503)
            assert httpx.get(f"{server.url}/healthz").status_code == 200, (
                "it is started again; nobody need end the process"
            )
            for _ in range(10):  # whichever front end takes them
                until(lambda: embed(server, "paris"), 200)
        assert server.process.poll() is None
        assert metric(server, r'cloze_tokens_total\{model="bert",version="1"\}') > 0, (
            "what dead processes counted stays"
        )
    assert sum("engine-0 ended with 1" in line for line in server.log) == 2


def test_4_requests_outlive_a_killed_engine_process(tiny_store: Path) -> None:
    """They wait for the next one, those that come meanwhile as well."""
    unlimited = {"CLOZE_WORKERS": "1", "CLOZE_MAX_QUEUE_WAIT_MS": "0"}
    with front_ends(tiny_store, **unlimited) as server, ThreadPoolExecutor(30) as pool:
        waiting = [pool.submit(embed, server, "moon " * n) for n in range(1, 21)]
        wait_until(lambda: metric(server, BATCHES) >= 3)
        (engine,) = children(server.process.pid, "engine-0")
        os.kill(engine, signal.SIGKILL)
        until(lambda: httpx.get(f"{server.url}/readyz"), 503)
        waiting += [pool.submit(embed, server, word) for word in WORDS[:4]]
        assert {future.result().status_code for future in waiting} == {200}
        assert httpx.get(f"{server.url}/readyz").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine-0", "frontend-0"])
def test_4_a_process_that_hangs_is_replaced(tiny_store: Path, name: str) -> None:
    with front_ends(tiny_store) as server, ThreadPoolExecutor(8) as pool:
        until(lambda: embed(server, "paris"), 200)
        wait_until(lambda: any("2 front ends are ready" in line for line in server.log))
        (stopped,) = children(server.process.pid, name)
        os.kill(stopped, signal.SIGSTOP)
        waiting = [pool.submit(embed, server, word) for word in WORDS[:8]]
        statuses = []
        for future in waiting:
            try:
                statuses.append(future.result().status_code)
            except httpx.TransportError:  # of a connection that the stopped front end had
                statuses.append(0)
        assert set(statuses) <= ({200} if name == "engine-0" else {200, 0})
        wait_until(lambda: children(server.process.pid, name) not in ([], [stopped]), longest_s=20)
        assert any(f"{name} has not reported for 8 s" in line for line in server.log)
        until(lambda: embed(server, "paris"), 200)


def test_4_a_front_end_that_dies_loses_only_its_own_requests(tiny_store: Path) -> None:
    """And the engine drops what it still had queued for it."""
    # 6 s of work. Of one length, since each takes 0.15 s: the server predicts the wait from the
    # rate of tokens, and refuses what would not end in time.
    texts, tokens = SLOW_TEXTS[:40], 5
    with (
        front_ends(
            tiny_store,
            CLOZE_WORKERS="1",
            CLOZE_MAX_BATCH_TOKENS="1",
            CLOZE_MAX_QUEUE_WAIT_MS="0",  # 6 s of work are admitted
        ) as server,
        httpx.Client(timeout=30.0, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(40) as pool,
    ):
        waiting = [
            pool.submit(client.post, f"{server.url}/embed", json={"inputs": text}) for text in texts
        ]
        wait_until(lambda: metric(server, QUEUED) >= 20 * tokens)
        # On a busy machine one front end may have accepted all of them.
        of_process = {
            process: name
            for name in ("frontend-0", "frontend-1")
            for process in children(server.process.pid, name)
        }
        front_end = max(of_process, key=lambda pid: len(psutil.Process(pid).net_connections("tcp")))
        os.kill(front_end, signal.SIGKILL)
        lost = [
            future for future in waiting if isinstance(future.exception(), httpx.TransportError)
        ]
        assert {future.result().status_code for future in waiting if future not in lost} <= {200}
        assert lost
        assert metric(server, BATCHES) < len(texts), "it ran what nobody waited for"
        name = of_process[front_end]
        wait_until(lambda: children(server.process.pid, name) not in ([], [front_end]))
        assert {response.status_code for response in at_once(server, WORDS)} == {200}


def test_7_nobody_queues_for_a_server_that_drains(tiny_store: Path) -> None:
    with (
        one_process(tiny_store, CLOZE_WORKERS="1", CLOZE_MAX_BATCH_TOKENS="1") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        slow = pool.submit(embed, server, ["moon " * n for n in range(1, 15)])  # 2 s
        wait_for_run(server, "moon")
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        # The kernel resets a connection that it has accepted and the server has not. The server
        # closes a connection whose request has not arrived.
        ended = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)
        with pytest.raises(ended):
            while time.monotonic() < deadline:  # until it listens no more
                assert httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
        assert not slow.done()
        assert slow.result().status_code == 200
        assert server.process.wait(20) == 0


def test_7_a_request_of_several_rounds_gets_them_all(tiny_store: Path) -> None:
    """Though the server drains and the queue is full when later rounds begin."""
    limits = {"CLOZE_WORKERS": "1", "CLOZE_MAX_BATCH_TOKENS": "1", "CLOZE_MAX_QUEUE_TOKENS": "1"}
    parameters = {"decode": "left-to-right", "top_k": 1}
    body = {"inputs": "moon [MASK] [MASK] [MASK] [MASK]", "parameters": parameters}
    with one_process(tiny_store, **limits) as server, ThreadPoolExecutor(2) as pool:
        rounds = pool.submit(httpx.post, f"{server.url}/fill-mask", json=body, timeout=30)
        wait_for_run(server, "moon")
        waiting = pool.submit(embed, server, "river walk")  # 3 s in the engine or in the queue
        wait_for_run(server, "river")
        wait_until(lambda: metric(server, QUEUED) > 0)
        assert embed(server, "walk").status_code == 429
        server.process.send_signal(signal.SIGTERM)
        assert rounds.result().status_code == 200, rounds.result().text
        assert len(rounds.result().json()[0]["tokens"]) == 4
        assert waiting.result().status_code == 200


def test_4_a_class_is_stated_and_a_lost_device_is_noticed(tiny_store: Path) -> None:
    with one_process(tiny_store, CLOZE_CANARY_INTERVAL_MS="200") as server:
        for route in ("/embed", "/v1/embeddings", "/v2/models/bert.embed/infer"):
            wrong = httpx.post(
                f"{server.url}{route}", json={}, headers={"x-request-class": "bulky"}
            )
            assert wrong.status_code in (400, 422)
            assert "x-request-class: bulk, or no such header, got 'bulky'" in wrong.text
        with Client(server.url, bulk=True) as client, Client(server.url) as plain:
            assert client.embed("walk").tolist() == plain.embed("walk").tolist()
        wait_until(lambda: metric(server, r'cloze_request_classes_total\{class="bulk"\}') == 1)
        durations = (
            r'cloze_request_duration_seconds_count\{model="bert",route="/embed",version="1"\}'
        )
        assert metric(server, durations) == 1, "the latency of bulk requests rings no alert"
        canaries = r'cloze_batches_total\{filled="canary",model="bert",version="1"\}'
        wait_until(lambda: metric(server, canaries) > 1)
        assert embed(server, "world").status_code == 200
        wait_until(lambda: not is_ready(server.url))
        reason = "it could not repeat its golden outputs while idle (RuntimeError)"
        wait_until(lambda: any(reason in line for line in server.log))


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:  # a single process has ended
        return False


def test_4_nobody_outlives_the_supervisor(tiny_store: Path) -> None:
    with front_ends(tiny_store) as server:
        family = children(server.process.pid, "")
        assert len(family) == 3
        server.stop(signal.SIGKILL)
        files = [Path(f"/proc/{pid}/cmdline") for pid in family]
        wait_until(lambda: not any(file.exists() and file.read_bytes() for file in files))


def test_5_the_server_starts_on_what_was_asked_for_or_not_at_all(tiny_store: Path) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime can use CUDA")
    done = cloze("serve", "--port", "0", "--model-store", str(tiny_store), "--device", "cuda")
    assert done.returncode == 2
    asked = "cloze: device cuda was asked for, but this onnxruntime has only"
    assert re.fullmatch(rf"{asked} .*\n", done.stderr), done.stderr


def test_6_a_flipped_byte_stops_the_start(tiny_store: Path, tmp_path: Path) -> None:
    store = shutil.copytree(tiny_store, tmp_path / "store")
    file = store / "bert" / "1" / "golden.json"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = cloze("serve", "--port", "0", "--model-store", str(store))
    assert done.returncode == 2
    assert re.fullmatch(r"cloze: .*sha256.*\n", done.stderr), done.stderr


def test_6_nothing_in_service_or_store_can_unpickle() -> None:
    for file in [*file_of("service").rglob("*.py"), *file_of("model_store").rglob("*.py")]:
        found = re.findall(
            r"\b(?:pickle|marshal|shelve|joblib|allow_pickle|eval|exec|importlib\.import_module)\b",
            file.read_text(),
        )
        assert not found, f"{file.name}: {found}"


@both_forms
def test_7_sigterm_under_load_finishes_what_was_accepted(
    tiny_store: Path, faulty_server: Faulty
) -> None:
    with faulty_server(tiny_store, CLOZE_WORKERS="2", CLOZE_MAX_BATCH_TOKENS="1") as server:
        host, port = server.url.removeprefix("http://").split(":")
        connections = [http.client.HTTPConnection(host, int(port), timeout=30) for _ in range(12)]
        for length, connection in enumerate(connections, start=1):
            connection.request("POST", "/embed", json.dumps({"inputs": "moon " * length}))
        # All are admitted once no more is missing from what waits and what is done than two workers
        # can be running.
        accepted = sum(range(3, 15)) - 14 - 13
        series = (r'cloze_tokens_total\{model="bert",version="1"\}', QUEUED)
        wait_until(lambda: sum(metric(server, one) for one in series) >= accepted)
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        responses = [connection.getresponse() for connection in connections]
        assert [response.status for response in responses] == [200] * 12
        assert all(len(json.loads(response.read())[0]) == 64 for response in responses)
        for connection in connections:
            connection.close()
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < 15
        with pytest.raises(httpx.TransportError):
            embed(server, "paris")


def test_7_a_text_that_is_being_tokenized_was_accepted(tiny_store: Path) -> None:
    """However long a busy machine takes to tokenize the text."""
    patience = {"CLOZE_SHUTDOWN_GRACE_MS": "100000", "CLOZE_REQUEST_TIMEOUT_MS": "100000"}
    with running_server(tiny_store, **patience) as server, ThreadPoolExecutor(1) as pool:
        huge = pool.submit(embed, server, ["the king " * 100_000] * 8, timeout=100.0)
        wait_until(lambda: metric(server, "cloze_requests_in_flight") > 1)  # one of them asks this
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert huge.result().status_code == 200
        assert server.process.wait(20) == 0


def test_7_what_cannot_finish_in_the_grace_period_is_told_so(tiny_store: Path) -> None:
    with (
        one_process(tiny_store, CLOZE_WORKERS="1", CLOZE_SHUTDOWN_GRACE_MS="500") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        hung = pool.submit(embed, server, "tree")
        wait_for_run(server, "tree")
        queued = pool.submit(embed, server, "paris walk")
        wait_until(lambda: metric(server, QUEUED) > 0)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for future in (hung, queued):
            response = future.result()
            assert response.status_code == 503
            assert response.json()["error_type"] == "Unhealthy"
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < 12


@pytest.mark.slow
def test_4_a_drain_ends_in_its_time_without_an_engine(tiny_store: Path) -> None:
    with (
        front_ends(tiny_store, CLOZE_SHUTDOWN_GRACE_MS="1000") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        (killed,) = children(server.process.pid, "engine-0")
        os.kill(killed, signal.SIGKILL)
        until(lambda: httpx.get(f"{server.url}/readyz"), 503)
        wait_until(lambda: children(server.process.pid, "engine-0") not in ([], [killed]))
        (replacing,) = children(server.process.pid, "engine-0")
        os.kill(replacing, signal.SIGSTOP)
        limit = {"x-request-timeout-ms": "50000"}
        asked = {"json": {"inputs": "paris"}, "headers": limit, "timeout": 60}
        waiting = pool.submit(httpx.post, f"{server.url}/embed", **asked)
        wait_until(lambda: metric(server, "cloze_requests_in_flight") > 1)  # one of them asks this
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert error_of(waiting.result()) == (503, "shutting_down")
        server.process.wait(20)
        assert time.monotonic() - began < 15
