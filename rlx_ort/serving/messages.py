"""The protocol's protobuf messages, made at run time from the table below.

The field numbers are those of the Open Inference Protocol and of Triton's extensions, so any client's stubs fit. The
package has a name of its own: stubs of tritonclient and kserve, which both register `inference`, may be loaded beside.
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]  # no types

PACKAGE = "rlx_ort.inference"

_MODEL = "name:1 version:2"
_SPAN = "StatisticDuration"
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live:1:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready:1:bool",
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": "ready:1:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name:1 version:2 extensions:3:string*",
    "ModelMetadataRequest": _MODEL,
    "TensorMetadata": "name:1 datatype:2 shape:3:int64*",
    "ModelMetadataResponse": "name:1 versions:2:string* platform:3 inputs:4:TensorMetadata* outputs:5:TensorMetadata*",
    "InferParameter": "bool_param:1:bool? int64_param:2:int64? string_param:3:string? double_param:4:double? "
    "uint64_param:5:uint64?",
    "InferTensorContents": "bool_contents:1:bool* int_contents:2:int32* int64_contents:3:int64* "
    "uint_contents:4:uint32* uint64_contents:5:uint64* fp32_contents:6:float* "
    "fp64_contents:7:double* bytes_contents:8:bytes*",
    "InferInputTensor": "name:1 datatype:2 shape:3:int64* parameters:4:InferParameter% contents:5:InferTensorContents",
    "InferRequestedOutputTensor": "name:1 parameters:2:InferParameter%",
    "InferOutputTensor": "name:1 datatype:2 shape:3:int64* parameters:4:InferParameter% contents:5:InferTensorContents",
    "ModelInferRequest": "model_name:1 model_version:2 id:3 parameters:4:InferParameter% inputs:5:InferInputTensor* "
    "outputs:6:InferRequestedOutputTensor* raw_input_contents:7:bytes*",
    "ModelInferResponse": "model_name:1 model_version:2 id:3 parameters:4:InferParameter% outputs:5:InferOutputTensor* "
    "raw_output_contents:6:bytes*",
    "ModelStreamInferResponse": "error_message:1 infer_response:2:ModelInferResponse",
    "ModelConfigRequest": _MODEL,
    "ModelInput": "name:1 data_type:2:int32 dims:4:int64*",
    "ModelOutput": "name:1 data_type:2:int32 dims:3:int64*",
    "ModelInstanceGroup": "name:1 count:2:int32 kind:4:int32",
    "ModelDynamicBatching": "",
    "ModelParameter": "string_value:1",
    "ModelConfig": "name:1 platform:2 max_batch_size:4:int32 input:5:ModelInput* output:6:ModelOutput* "
    "instance_group:7:ModelInstanceGroup* dynamic_batching:11:ModelDynamicBatching "
    "parameters:14:ModelParameter% backend:17",
    "ModelConfigResponse": "config:1:ModelConfig",
    "ModelStatisticsRequest": _MODEL,
    _SPAN: "count:1:uint64 ns:2:uint64",
    "InferStatistics": f"success:1:{_SPAN} fail:2:{_SPAN} queue:3:{_SPAN} compute_input:4:{_SPAN} "
    f"compute_infer:5:{_SPAN} compute_output:6:{_SPAN}",
    "InferBatchStatistics": f"batch_size:1:uint64 compute_input:2:{_SPAN} compute_infer:3:{_SPAN} "
    f"compute_output:4:{_SPAN}",
    "ModelStatistics": "name:1 version:2 last_inference:3:uint64 inference_count:4:uint64 execution_count:5:uint64 "
    "inference_stats:6:InferStatistics batch_stats:7:InferBatchStatistics*",
    "ModelStatisticsResponse": "model_stats:1:ModelStatistics*",
    "RepositoryIndexRequest": "repository_name:1 ready:2:bool",
    "ModelIndex": "name:1 version:2 state:3 reason:4",
    "RepositoryIndexResponse": "models:1:ModelIndex*",
    "ModelRepositoryParameter": "bool_param:1:bool? int64_param:2:int64? string_param:3:string? bytes_param:4:bytes?",
    "RepositoryModelLoadRequest": "repository_name:1 model_name:2 parameters:3:ModelRepositoryParameter%",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name:1 model_name:2 parameters:3:ModelRepositoryParameter%",
    "RepositoryModelUnloadResponse": "",
    "HealthCheckRequest": "service:1",
    "HealthCheckResponse": "status:1:int32",
}
"""Message -> fields as NAME:NUMBER:TYPE, a string by default; `*` repeats, `%` maps texts to it, `?` is in a oneof."""


def _made() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="rlx_ort/inference.proto", package=PACKAGE, syntax="proto3")
    field_type = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if "?" in fields:
            message.oneof_decl.add(name="choice")
        for text in fields.split():
            label, number, *kinds = text.split(":")
            kind = kinds[0] if kinds else "string"
            mark = kind[-1] if kind[-1] in "*%?" else ""
            kind = kind.rstrip("*%?")
            field = message.field.add(name=label, number=int(number))
            field.label = field_type.LABEL_REPEATED if mark in ("*", "%") else field_type.LABEL_OPTIONAL
            if mark == "?":
                field.oneof_index = 0
            if mark == "%":
                entry = message.nested_type.add(name=f"{label.title()}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=field_type.TYPE_STRING, label=field_type.LABEL_OPTIONAL)
                entry.field.add(
                    name="value",
                    number=2,
                    type=field_type.TYPE_MESSAGE,
                    label=field_type.LABEL_OPTIONAL,
                    type_name=f".{PACKAGE}.{kind}",
                )
                field.type, field.type_name = field_type.TYPE_MESSAGE, f".{PACKAGE}.{name}.{entry.name}"
            elif kind in _MESSAGES:
                field.type, field.type_name = field_type.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                field.type = getattr(field_type, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    types = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in _MESSAGES}
    return SimpleNamespace(**{name: message_factory.GetMessageClass(each) for name, each in types.items()})


messages: Any = _made()
"""Its attributes are the message classes."""
