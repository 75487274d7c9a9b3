"""Whatever client a stranger takes, there is an answer: command line, gRPC stubs, gRPC by reflection, openai."""

import json
import subprocess
import sys

import grpc
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from protos.cidery.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

QUESTION = "What is the capital of France?"
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def cidery(served, *arguments: str, stdin: str = "") -> str:
    command = [sys.executable, "-m", "cluster", *arguments, "--address", served.grpc]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_chats(three_macs):
    assert "Paris" in cidery(three_macs, "chat", QUESTION)


def test_a_chat_on_the_command_line_remembers_its_turns(three_macs):
    answers = cidery(three_macs, "chat", stdin="Hi, my name is Anna.\nWhat is my name?\n")
    assert "Anna" in answers.splitlines()[-1]


def test_generate_prints_json_for_machines(three_macs):
    answer = json.loads(cidery(three_macs, "generate", "--json", "--max-tokens", "5", "Hello"))
    assert len(answer["token_ids"]) <= 5
    assert answer["usage"]["num_completion_tokens"] == len(answer["token_ids"])
    assert answer["mac"] in three_macs.macs


def test_status_lists_every_mac(three_macs):
    table = cidery(three_macs, "status")
    fleet = json.loads(cidery(three_macs, "status", "--json"))["macs"]
    assert [mac["name"] for mac in fleet] == three_macs.macs
    assert all(name in table for name in three_macs.macs)


def test_a_call_to_nobody_says_what_to_start():
    command = [sys.executable, "-m", "cluster", "status", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "is `cidery serve` running at 127.0.0.1:1?" in done.stderr


def test_grpc_stubs_stream_an_answer_with_usage_and_mac(three_macs):
    with three_macs.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        message = inference_pb2.ChatMessage(role="user", content=QUESTION)
        responses = list(stub.Chat(inference_pb2.ChatRequest(messages=[message])))
        text = "".join(response.chunk.text for response in responses)
        completion = responses[-1].completion
        count = sum(len(response.chunk.token_ids) for response in responses)
    assert "Paris" in text
    assert completion.finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert completion.usage.num_completion_tokens == count
    assert completion.mac in three_macs.macs
    assert 0 < completion.timings.route_s <= completion.timings.first_token_s <= completion.timings.total_s


def test_a_client_without_our_code_finds_its_way_by_reflection(three_macs):
    with three_macs.channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "cidery.v1.InferenceService" in database.get_services()
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("cidery.v1.InferenceService").FindMethodByName("Generate")
        request = GetMessageClass(method.input_type)(text="Hello", sampling={"max_tokens": 4})
        call = channel.unary_stream(
            "/cidery.v1.InferenceService/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        responses = list(call(request))
    assert responses[-1].completion.usage.num_completion_tokens <= 4


def test_health_is_serving_once_a_mac_is_ready(three_macs):
    with three_macs.channel() as channel:
        request = health_pb2.HealthCheckRequest(service="cidery.v1.InferenceService")
        answer = health_pb2_grpc.HealthStub(channel).Check(request)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert three_macs.client.get("/health").json()["status"] == "ok"


def test_the_openai_package_gets_whole_and_streamed_answers(three_macs):
    with openai.OpenAI(base_url=f"{three_macs.http}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": QUESTION}]
        whole = client.chat.completions.create(model=model, messages=messages, logprobs=True, top_logprobs=2)
        chunks = list(
            client.chat.completions.create(
                model=model, messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        text = client.completions.create(model=model, prompt="Hello", max_tokens=3)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in whole.choices[0].message.content
    assert streamed == whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in whole.choices[0].logprobs.content)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert text.usage.completion_tokens <= 3


def test_stop_strings_end_the_answer_before_them(three_macs):
    messages = [{"role": "user", "content": "Count from 3 to 9."}]
    plain = three_macs.chat(messages)["choices"][0]["message"]["content"]
    assert "6" in plain
    stopped = three_macs.chat(messages, stop=["6", "zebra"])["choices"][0]
    assert stopped["message"]["content"] == plain[: plain.index("6")]
    assert stopped["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(three_macs):
    def answer(seed: int) -> str:
        messages = [{"role": "user", "content": "Tell me a story about Tom and a bear."}]
        return three_macs.chat(messages, seed=seed, temperature=1.5, max_tokens=40)["choices"][0]["message"]["content"]

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_metrics_count_requests_and_tokens(three_macs):
    three_macs.chat([{"role": "user", "content": "Hello!"}], max_tokens=3)
    text = three_macs.client.get("/metrics").text
    assert 'cidery_requests_total{model="cidery-tiny",outcome="' in text
    assert "cidery_first_token_seconds_bucket" in text


@pytest.mark.parametrize("service", ["cidery.v1.InferenceService", "cidery.v1.AdminService", "grpc.health.v1.Health"])
def test_reflection_lists_every_service(three_macs, service):
    with grpc.insecure_channel(three_macs.grpc) as channel:
        assert service in ProtoReflectionDescriptorDatabase(channel).get_services()
