"""Choices that settings, the engine and transports name alike."""

from typing import Literal

Quantization = Literal["none", "fp8", "int8", "int4"]  # of layers; on CPUs int8 and int4 of embedding and head too
KvDType = Literal["auto", "fp8"]  # of pages; auto: the model's
Transport = Literal["cuda_ipc", "shm", "nixl", "grpc"]
Speculate = Literal["auto", "off", "ngram", "draft"]  # what drafts an answer's tokens
MTP = "mtp"  # as a draft model: the model's own layer that predicts several tokens ahead
MOST_CONTEXT_TOKENS = 1 << 24  # of any checkpoint, above the longest known: tables have a row for each
