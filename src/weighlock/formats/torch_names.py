"""The names torch's pickles use, as tables of exact pairs of module and name.

Knows which names are harmless to name; what records with these names mean is `rebuild`'s.
"""

import functools

__all__ = [
    "ML_DTYPES",
    "STORAGE_DTYPES",
    "STORAGE_WIDTHS",
    "TENSOR_CLASSES",
    "canonical",
    "is_known",
    "storage_dtype",
]

# Old and new homes of the same thing.
_SPELLINGS = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "torch.tensor": "torch._tensor",
    "torch.cuda": "torch",
}

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
"""Element type of each storage class; UntypedStorage has none, its tensors say it."""

STORAGE_WIDTHS = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "quint8", "qint8", "quint4x2", "quint2x4", ""), 1),
    "complex128": 16,
}
"""Bytes of an element of each storage; of one without a type, one."""

TENSOR_CLASSES = {
    name.replace("Storage", "Tensor"): dtype for name, dtype in STORAGE_DTYPES.items()
}

ML_DTYPES = (
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
)
"""Element types of numpy arrays that numpy itself lacks, of those that are read."""

_UTILS = (
    "_rebuild_tensor",
    "_rebuild_tensor_v2",
    "_rebuild_tensor_v3",
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
    "_rebuild_qtensor",
    "_rebuild_sparse_tensor",
    "_rebuild_sparse_csr_tensor",
    "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_xla_tensor",
    "_rebuild_wrapper_subclass",
)

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex32", "complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
    *("half", "float", "double", "short", "int", "long", "cfloat", "cdouble", "chalf"),
)
_QSCHEMES = (
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine"),
    *("per_channel_symmetric", "per_channel_affine_float_qparams"),
)

_DISTRIBUTED = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)

_TENSOR_SPECS = ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
_PLACEMENTS = ("Shard", "Replicate", "Partial", "_StridedShard")

# What a checkpoint may name without anybody having to look: tensors, numbers, containers.
_KNOWN = {
    *(("torch._utils", name) for name in _UTILS),
    *(("torch", name) for name in (*STORAGE_DTYPES, *TENSOR_CLASSES, "UntypedStorage")),
    *(("torch.storage", name) for name in ("UntypedStorage", "TypedStorage", "_LegacyStorage")),
    *(("torch", name) for name in (*_DTYPES, *_QSCHEMES, "Size", "Tensor", "device")),
    ("torch.serialization", "_get_layout"),
    *(("torch.jit._pickle", f"build_{kind}list") for kind in ("int", "tensor", "double", "bool")),
    ("torch.jit._pickle", "restore_type_tag"),
    ("torch._tensor", "_rebuild_from_type"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
    ("torch.nn.parameter", "UninitializedParameter"),
    ("torch.nn.parameter", "UninitializedBuffer"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "Counter"),
    ("collections", "deque"),
    *(
        ("builtins", name)
        for name in ("set", "frozenset", "bytearray", "complex", "slice", "range")
    ),
    *(
        ("builtins", name)
        for name in ("dict", "list", "tuple", "int", "float", "str", "bytes", "bool")
    ),
    ("_codecs", "encode"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(("ml_dtypes", name) for name in ML_DTYPES),
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("datetime", "datetime"),
    ("datetime", "date"),
    ("datetime", "timedelta"),
    *(("torch.distributed.checkpoint.metadata", name) for name in _DISTRIBUTED),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.metadata", "ShardMetadata"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    # What torch itself takes for safe to load.
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"),
    ("torch.nested._internal.nested_tensor", "NestedTensor"),
    ("torch._dynamo.decorators", "_DimRange"),
    ("torch.distributed.tensor", "DTensor"),
    *(("torch.distributed.tensor._dtensor_spec", name) for name in _TENSOR_SPECS),
    *(("torch.distributed.tensor.placement_types", name) for name in _PLACEMENTS),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch.distributed._mesh_layout", "_FlatLayout"),
}


def canonical(module: str, name: str) -> tuple[str, str]:
    """The name under which the tables know something that has moved between versions."""
    return _SPELLINGS.get(module, module), name


def is_known(module: str, name: str) -> bool:
    """Whether a checkpoint names this in the ordinary course of things."""
    module, name = canonical(module, name)
    if module.startswith("numpy.dtypes") and name.endswith("DType"):
        return True
    return (module, name) in _KNOWN


@functools.lru_cache(256)
def storage_dtype(module: str, name: str) -> str | None:
    """The element type of a storage class; "" for plain bytes; None if it is no such class."""
    module, name = canonical(module, name)
    if (module, name) in (("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage")):
        return ""
    return STORAGE_DTYPES.get(name) if module == "torch" else None
