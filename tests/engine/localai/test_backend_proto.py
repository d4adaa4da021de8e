"""The protocol of an engine, name by name and number by number: a wrong number is read as another field, silently."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from enginehouse.engine.localai import backend_pb2

SHARED = Path(os.environ.get("ENGINEHOUSE_SHARED") or Path(__file__).parents[4] / "shared")
FACTS = SHARED / "reference" / "gallery-and-backends.md"
FILE = backend_pb2.DESCRIPTOR

UNARY, SERVER, BOTH = "unary", "server stream", "bidi stream"
# Every call: its request, its answer, and which of them are streams.
CALLS = {
    "Health": ("HealthMessage", "Reply", UNARY),
    "Free": ("HealthMessage", "Result", UNARY),
    "Predict": ("PredictOptions", "Reply", UNARY),
    "LoadModel": ("ModelOptions", "Result", UNARY),
    "PredictStream": ("PredictOptions", "Reply", SERVER),
    "Embedding": ("PredictOptions", "EmbeddingResult", UNARY),
    "GenerateImage": ("GenerateImageRequest", "Result", UNARY),
    "UpscaleImage": ("UpscaleImageRequest", "Result", UNARY),
    "GenerateVideo": ("GenerateVideoRequest", "Result", UNARY),
    "Generate3D": ("Generate3DRequest", "Result", UNARY),
    "AudioTranscription": ("TranscriptRequest", "TranscriptResult", UNARY),
    "AudioTranscriptionStream": ("TranscriptRequest", "TranscriptStreamResponse", SERVER),
    "AudioTranscriptionLive": ("TranscriptLiveRequest", "TranscriptLiveResponse", BOTH),
    "TTS": ("TTSRequest", "Result", UNARY),
    "TTSStream": ("TTSRequest", "Reply", SERVER),
    "SoundGeneration": ("SoundGenerationRequest", "Result", UNARY),
    "TokenizeString": ("PredictOptions", "TokenizationResponse", UNARY),
    "Detokenize": ("DetokenizeRequest", "DetokenizeResponse", UNARY),
    "Status": ("HealthMessage", "StatusResponse", UNARY),
    "Detect": ("DetectOptions", "DetectResponse", UNARY),
    "SoundDetection": ("SoundDetectionRequest", "SoundDetectionResponse", UNARY),
    "Depth": ("DepthRequest", "DepthResponse", UNARY),
    "FaceVerify": ("FaceVerifyRequest", "FaceVerifyResponse", UNARY),
    "FaceAnalyze": ("FaceAnalyzeRequest", "FaceAnalyzeResponse", UNARY),
    "VoiceVerify": ("VoiceVerifyRequest", "VoiceVerifyResponse", UNARY),
    "VoiceAnalyze": ("VoiceAnalyzeRequest", "VoiceAnalyzeResponse", UNARY),
    "VoiceEmbed": ("VoiceEmbedRequest", "VoiceEmbedResponse", UNARY),
    "StoresSet": ("StoresSetOptions", "Result", UNARY),
    "StoresDelete": ("StoresDeleteOptions", "Result", UNARY),
    "StoresGet": ("StoresGetOptions", "StoresGetResult", UNARY),
    "StoresFind": ("StoresFindOptions", "StoresFindResult", UNARY),
    "Rerank": ("RerankRequest", "RerankResult", UNARY),
    "TokenClassify": ("TokenClassifyRequest", "TokenClassifyResponse", UNARY),
    "Score": ("ScoreRequest", "ScoreResponse", UNARY),
    "GetMetrics": ("MetricsRequest", "MetricsResponse", UNARY),
    "VAD": ("VADRequest", "VADResponse", UNARY),
    "Diarize": ("DiarizeRequest", "DiarizeResponse", UNARY),
    "AudioEncode": ("AudioEncodeRequest", "AudioEncodeResult", UNARY),
    "AudioDecode": ("AudioDecodeRequest", "AudioDecodeResult", UNARY),
    "AudioTransform": ("AudioTransformRequest", "AudioTransformResult", UNARY),
    "AudioTransformStream": ("AudioTransformFrameRequest", "AudioTransformFrameResponse", BOTH),
    "AudioToAudioStream": ("AudioToAudioRequest", "AudioToAudioResponse", BOTH),
    "ModelMetadata": ("ModelOptions", "ModelMetadataResponse", UNARY),
    "StartFineTune": ("FineTuneRequest", "FineTuneJobResult", UNARY),
    "FineTuneProgress": ("FineTuneProgressRequest", "FineTuneProgressUpdate", SERVER),
    "StopFineTune": ("FineTuneStopRequest", "Result", UNARY),
    "ListCheckpoints": ("ListCheckpointsRequest", "ListCheckpointsResponse", UNARY),
    "ExportModel": ("ExportModelRequest", "Result", UNARY),
    "StartQuantization": ("QuantizationRequest", "QuantizationJobResult", UNARY),
    "QuantizationProgress": ("QuantizationProgressRequest", "QuantizationProgressUpdate", SERVER),
    "StopQuantization": ("QuantizationStopRequest", "Result", UNARY),
    "Forward": ("ForwardRequest", "ForwardReply", BOTH),
}
COMPACT = re.compile(r"(\w+)\s*=\s*(\d+)[: ]\s*((?:repeated |optional )?(?:map<\w+,\s*\w+>|\w+))( \(oneof\))?")

needs_facts = pytest.mark.skipif(not FACTS.is_file(), reason="a user's checkout has no fact sheet")


def test_the_protocol_has_exactly_the_52_calls() -> None:
    assert FILE.package == "backend"
    found = {}
    for method in FILE.services_by_name["Backend"].methods:
        kind = {(False, False): UNARY, (False, True): SERVER, (True, True): BOTH}[
            method.client_streaming, method.server_streaming
        ]
        found[method.name] = (method.input_type.name, method.output_type.name, kind)
    assert len(found) == 52
    assert found == CALLS


def test_the_committed_code_is_that_of_the_committed_proto() -> None:
    """A number changed in one of the two files only would go unseen until an engine misreads it."""
    source = (Path(backend_pb2.__file__).parent / "backend.proto").read_text()
    declared = set()
    message = ""
    for line in source.splitlines():
        if opened := re.match(r"message (\w+) \{", line):
            message = opened[1]
        elif field := re.match(r"\s+(?:optional |repeated )?(?:map<\w+, \w+>|\w+) (\w+) = (\d+);", line):
            declared.add((message, field[1], int(field[2])))
    generated = {
        (name, field.name, field.number)
        for name, described in FILE.message_types_by_name.items()
        for field in described.fields
    }
    assert generated == declared


@needs_facts
def test_the_calls_are_those_of_the_fact_sheet() -> None:
    rows = (_cells(line) for line in _section("### 4.2", "### 4.3"))
    stated = {row[0]: (row[1], row[2], row[3]) for row in rows if len(row) > 3 and row[3] in (UNARY, SERVER, BOTH)}
    assert stated == CALLS


@needs_facts
def test_every_field_has_the_number_and_the_type_of_the_fact_sheet() -> None:
    stated = _stated_messages()
    assert set(stated) == set(FILE.message_types_by_name)
    for name, fields in stated.items():
        described = FILE.message_types_by_name[name]
        assert {field.name: (field.number, _type(field)) for field in described.fields} == fields, name


@needs_facts
def test_every_enum_has_the_values_of_the_fact_sheet() -> None:
    text = "\n".join(_section("### 4.3", "### 4.4") + _section("## Appendix A", "## Appendix B"))
    stated = {}
    for name, values in re.findall(r"[Ee]num `(\w+)`[^:]*: (.*)", text):
        stated[name] = {value: int(number) for value, number in re.findall(r"`?(\w+)`? ?= ?(-?\d+)", values)}
    described = [*FILE.enum_types_by_name.values()]
    for message in FILE.message_types_by_name.values():
        described += message.enum_types
    assert {enum.name: {value.name: value.number for value in enum.values} for enum in described} == stated
    assert len(stated) == 3


def _section(start: str, end: str) -> list[str]:
    lines = FACTS.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(start))
    last = next(number for number, line in enumerate(lines) if number > first and line.startswith(end))
    return lines[first:last]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _stated_messages() -> dict[str, dict[str, tuple[int, str]]]:
    """Tables and compact lists of section 4.3, compact lists of appendix A: message, field, number and type."""
    stated: dict[str, dict[str, tuple[int, str]]] = {}
    name = ""
    for line in _section("### 4.3", "### 4.4"):
        if headed := re.match(r"\*\*(\w+)\*\*(.*)", line):
            name = headed[1]
            stated[name] = _compact(headed[2])
        elif line.startswith("|") and (cells := _cells(line))[1].isdigit():
            stated[name][cells[0]] = (int(cells[1]), cells[2])
    for line in _section("## Appendix A", "## Appendix B"):
        if listed := re.match(r"\* `(\w+)`: (.*)", line):
            stated[listed[1]] = _compact(listed[2])
    return stated


def _compact(text: str) -> dict[str, tuple[int, str]]:
    fields = {
        found[1]: (int(found[2]), f"oneof {found[3]}" if found[4] else found[3]) for found in COMPACT.finditer(text)
    }
    assert len(fields) == text.count("=")
    return fields


def _type(field: FieldDescriptor) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return f"map<{_plain(key)},{_plain(value)}>"
    if field.containing_oneof is not None:
        is_optional = field.containing_oneof.name.startswith("_")
        assert is_optional or field.containing_oneof.name == "payload"
        return f"{'optional' if is_optional else 'oneof'} {_plain(field)}"
    return f"repeated {_plain(field)}" if field.is_repeated else _plain(field)


def _plain(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return field.message_type.name
    if field.enum_type is not None:
        return field.enum_type.name
    scalars = {
        FieldDescriptor.TYPE_BOOL: "bool",
        FieldDescriptor.TYPE_BYTES: "bytes",
        FieldDescriptor.TYPE_DOUBLE: "double",
        FieldDescriptor.TYPE_FLOAT: "float",
        FieldDescriptor.TYPE_INT32: "int32",
        FieldDescriptor.TYPE_INT64: "int64",
        FieldDescriptor.TYPE_STRING: "string",
        FieldDescriptor.TYPE_UINT32: "uint32",
        FieldDescriptor.TYPE_UINT64: "uint64",
    }
    return scalars[field.type]
