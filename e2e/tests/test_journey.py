"""What a user does on two nodes with our images, from `helm install` to `helm uninstall`. The tests are steps of one story."""

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import grpc
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from aerostat.v1 import inference_pb2, inference_pb2_grpc
from aerostat_testing.calls import CALL_LIMIT, chat, post
from aerostat_testing.kubernetes.nodes.door import Door
from aerostat_testing.kubernetes.nodes.fixtures import Tell
from aerostat_testing.kubernetes.nodes.release import QUICKSTART, SOURCE, Release, memory_of
from aerostat_testing.load import Listener, Load
from aerostat_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.e2e]

MODELS: Final = ("assistant", "coder")
HELLO: Final = [{"role": "user", "content": "Hello!"}]
LONG: Final = "The tide comes in and the tide goes out, and the gulls count every stone on the shore. " * 12
N_LONG: Final = 150  # tokens that take seconds
SERVING: Final = "example.com/serving"
FIELD: Final = "contextLength"  # of a Model: nobody misses it in the schema who does not use it


@pytest.fixture(scope="module")
def http(release: Release) -> Iterator[Door]:
    with release.door("http") as door:
        yield door


def test_the_chart_installs(release: Release, tell: Tell) -> None:
    release.seed(SOURCE)
    began = time.monotonic()
    release.install()
    for component, count in (("operator", 2), ("router", 2), ("engines", 2), ("agent", 2)):
        release.wait_pods(component, count)
    tell(f"helm install, all pods ready: {time.monotonic() - began:.1f} s\n{release.pod_table()}")


def test_declared_models_become_ready_each_on_a_node_of_its_own(release: Release, tell: Tell) -> None:
    began = time.monotonic()
    release.team.kubectl("apply", f"--filename={QUICKSTART}")
    release.wait_ready(*MODELS)
    tell(f"kubectl apply until both Models are Ready: {time.monotonic() - began:.1f} s; {release.places()}")
    assert sorted(release.places().values(), key=str) == [{"node1"}, {"node2"}]


def test_a_call_through_the_service_is_answered(http: Door, tell: Tell) -> None:
    for model in MODELS:
        began = time.monotonic()
        answer = chat(http.url, model, HELLO)
        tell(f"first call of {model}: {time.monotonic() - began:.2f} s, {answer}")
        assert answer.text


async def test_three_turns_over_http_find_what_was_said_in_the_cache(http: Door, tell: Tell) -> None:
    for model in MODELS:
        async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="unused", timeout=CALL_LIMIT) as client:
            messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"{model}. {LONG}"}]
            cached = []
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model=model, messages=messages, max_tokens=12, temperature=0, extra_headers={"x-session-id": f"http-{model}"}
                )
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "More."}]
        tell(f"{model} over HTTP: cached tokens of three turns {cached}")
        assert cached[0] < cached[1] < cached[2]


def test_three_turns_over_grpc_find_what_was_said_in_the_cache(release: Release, tell: Tell) -> None:
    with release.door("grpc") as door, grpc.insecure_channel(door.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for model in MODELS:
            options = inference_pb2.CallOptions(session_id=f"grpc-{model}", max_tokens=12, temperature=0.0)
            messages = [inference_pb2.ChatMessage(role="user", content=f"gRPC {model}. {LONG}")]
            cached = []
            for _ in range(3):
                request = inference_pb2.ChatRequest(model=model, messages=messages, options=options)
                reply = stub.Chat(request, timeout=CALL_LIMIT)
                cached.append(reply.usage.cached_tokens)
                messages += [reply.message, inference_pb2.ChatMessage(role="user", content="More.")]
            tell(f"{model} over gRPC: cached tokens of three turns {cached}")
            assert cached[0] < cached[1] < cached[2]


def test_kubectl_shows_what_runs_and_what_happened(release: Release, tell: Tell) -> None:
    table = release.team.kubectl("get", "models,pools,instances", "--output=wide")
    tell(f"kubectl get models,pools,instances -o wide\n{table}")
    rows = {words[0].partition("/")[2]: words[1:] for line in table.splitlines() if (words := line.split())}
    assert all(rows[model][0] == "True" for model in MODELS)
    described = release.team.kubectl("describe", "model", "coder")
    tell(f"kubectl describe model coder\n{described}")
    assert "Ready" in described
    assert "Events:" in described


def test_each_component_is_as_large_as_its_limits_say(release: Release, tell: Tell) -> None:
    for component in ("operator", "router", "agent", "engines"):
        for pod in release.pods(component):
            tell(f"at rest: {pod['metadata']['name']} on {pod['spec']['nodeName']}: {memory_of(pod) / 2**20:.0f} MiB")
    assert all(memory_of(pod) < 256 * 2**20 for component in ("operator", "router", "agent") for pod in release.pods(component))


def test_a_model_in_use_is_deleted_and_its_streams_are_told(release: Release, http: Door, tell: Tell) -> None:
    with Listener(http.url, "coder", n_tokens=N_LONG) as client:
        began = time.monotonic()
        release.team.kubectl("delete", "model", "coder", "--timeout=60s")
        took = time.monotonic() - began
    tell(f"a Model in use is deleted: gone after {took:.1f} s; its stream: {client.ending}")
    assert client.is_whole or client.error

    def is_unknown() -> bool:
        answer = post(http.url, {"model": "coder", "messages": HELLO, "max_tokens": 1})
        return bool(answer.is_error and answer.json()["error"]["code"] == "model_not_found")

    wait_for(is_unknown, "callers are told that there is no such model", limit=30)
    assert chat(http.url, "assistant", HELLO).text
    release.team.kubectl("apply", f"--filename={QUICKSTART}")
    release.wait_ready(*MODELS)


def test_a_pool_shrinks_to_one_node_and_grows_again(release: Release, http: Door, tell: Tell) -> None:
    (gone,) = release.places()["coder"]
    (kept,) = release.places()["assistant"]
    release.nodes.kubectl("label", "node", kept, f"{SERVING}=yes")
    with Load(http.url, *MODELS) as load, Listener(http.url, "coder", n_tokens=N_LONG) as client:
        began = time.monotonic()
        _select(release, {SERVING: "yes"})
        release.wait_for(lambda: release.places().get("coder") == {kept}, "the model is served where the Pool still is", limit=240)
        release.wait_for(lambda: len(release.team.get("instances")["items"]) == 1, "the other Instance is gone", limit=120)
        took = time.monotonic() - began
    tell(f"a Pool shrinks to {kept}: {took:.1f} s; stream: {client.ending}; calls: {load.told(began)}")
    assert client.is_whole or client.error
    release.nodes.kubectl("label", "node", gone, f"{SERVING}=yes")
    began = time.monotonic()
    release.wait_for(lambda: len(release.team.get("instances")["items"]) == 2, "the node's Instance is there again", limit=60)
    tell(f"a Pool grows by {gone}: its Instance is there after {time.monotonic() - began:.1f} s; {release.places()}")
    release.wait_ready(*MODELS)


def test_a_cordoned_node_is_left_without_a_broken_stream(release: Release, http: Door, tell: Tell) -> None:
    node = sorted(release.places()["coder"])[0]
    others = set(release.nodes.names) - {node}
    with Load(http.url, "coder") as load, Listener(http.url, "coder", n_tokens=N_LONG) as client:
        began = time.monotonic()
        release.nodes.kubectl("cordon", node)
        release.wait_for(lambda: release.places().get("coder") == others, "the model is served elsewhere", limit=240)
        took = time.monotonic() - began
    tell(f"{node} is cordoned, coder on {others}: {took:.1f} s; stream: {client.ending}; calls: {load.told(began)}")
    release.nodes.kubectl("uncordon", node)
    assert client.is_whole
    assert load.away(began) == 0.0
    release.wait_ready(*MODELS)


def test_an_upgrade_brings_values_and_schemas_under_live_streams(release: Release, http: Door, tell: Tell) -> None:
    _forget_a_field(release)
    routers, agents, engines = (release.pods(component) for component in ("router", "agent", "engines"))
    with Load(http.url, *MODELS) as load, Listener(http.url, "assistant", n_tokens=N_LONG) as client:
        began = time.monotonic()
        changed = {"router": {"replicas": 3, "logLevel": "debug"}, "agent": {"podAnnotations": {"example.com/changed": "yes"}}}
        release.upgrade(changed, "--wait=legacy", "--timeout=4m")
        release.wait_replaced("agent", agents, 2)
        release.wait_pods("router", 3)
        took = time.monotonic() - began
    tell(f"helm upgrade --wait: {took:.1f} s; stream: {client.ending}; calls: {load.told(began)}")
    assert client.is_whole
    assert load.away(began) == 0.0
    assert FIELD in _spec_fields(release), "the schema came with the upgrade"
    assert not _uids(routers) & _uids(release.pods("router"))
    assert _uids(engines) == _uids(release.pods("engines")), "engines are never ended by an upgrade"
    release.wait_ready(*MODELS)


def test_a_rollback_brings_back_the_values_and_leaves_the_schemas(release: Release, http: Door, tell: Tell) -> None:
    with Load(http.url, *MODELS) as load, Listener(http.url, "coder", n_tokens=N_LONG) as client:
        began = time.monotonic()
        release.helm("rollback", release.name, "1", "--wait", "--timeout=4m")
        release.wait_pods("router", 2)
        took = time.monotonic() - began
    tell(f"helm rollback --wait: {took:.1f} s; stream: {client.ending}; calls: {load.told(began)}")
    assert client.is_whole
    assert load.away(began) == 0.0
    assert FIELD in _spec_fields(release)
    release.wait_ready(*MODELS)


def test_what_stays_after_an_uninstall_are_objects_schemas_and_weights(release: Release, tell: Tell) -> None:
    began = time.monotonic()
    release.helm("uninstall", release.name, "--wait", "--timeout=4m")
    release.wait_for(lambda: not release.pod_names(), lambda: f"no pod is left; left are {release.pod_names()}", limit=120)
    tell(f"helm uninstall --wait: {time.monotonic() - began:.1f} s")
    assert {item["metadata"]["name"] for item in release.team.get("models")["items"]} == set(MODELS)
    assert all(any((release.nodes.disk(name) / "var/cache/aerostat/models").iterdir()) for name in release.nodes.names)
    kinds = "all,configmaps,secrets,roles,rolebindings,networkpolicies,poddisruptionbudgets"
    for space in (release.system, release.node_pods):
        left = space.kubectl("get", kinds, "--selector=app.kubernetes.io/part-of=aerostat", "--output=name").split()
        tell(f"left in {space.name}: {left or 'nothing'}")
        assert not [name for name in left if not name.startswith("secret/")]
    wide = release.nodes.kubectl("get", "clusterroles,clusterrolebindings,validatingadmissionpolicies", "--output=name").split()
    assert not [name for name in wide if "aerostat" in name]


def _select(release: Release, labels: dict[str, str]) -> None:
    release.team.kubectl("patch", "pool", "cpu", "--type=merge", f"--patch={json.dumps({'spec': {'nodeSelector': labels}})}")


def _models_crd(release: Release) -> tuple[dict[str, Any], dict[str, Any]]:
    """And in it, the fields of `spec`."""
    crd = release.nodes.get("crd", "models.aerostat.dev")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return crd, schema["spec"]["properties"]


def _spec_fields(release: Release) -> set[str]:
    return set(_models_crd(release)[1])


def _forget_a_field(release: Release) -> None:
    """The cluster has the schema of a release before that field."""
    crd, spec = _models_crd(release)
    del spec[FIELD]
    release.nodes.kubectl("replace", "--filename=-", stdin=json.dumps(crd))
    assert FIELD not in _spec_fields(release)


def _uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}
