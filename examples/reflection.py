"""Talks to a server without generated code: its types come from the server itself.

python examples/reflection.py [HOST:PORT] [PROMPT]; needs grpcio and grpcio-reflection.
Any gRPC tool that knows server reflection does the same.
"""

from __future__ import annotations

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "orca.v1.GenerateService"


def main(address: str = "127.0.0.1:50051", prompt: str = "The three primary colours are") -> None:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        print("services:", ", ".join(sorted(database.get_services())))
        service = DescriptorPool(database).FindServiceByName(SERVICE)
        method = service.FindMethodByName("GenerateStream")
        request_type = GetMessageClass(method.input_type)
        chunk_type = GetMessageClass(method.output_type)
        stream = channel.unary_stream(
            f"/{SERVICE}/{method.name}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=chunk_type.FromString,
        )
        for chunk in stream(request_type(text=prompt, sampling={"max_tokens": 16})):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
