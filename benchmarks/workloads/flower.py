"""Messages with arrays as Flower packs them: imported only where Flower is installed.

Two ways: one protobuf message, and the objects of up to a few MB, each named by its SHA-256, in
which Flower sends the same records. Arrays are numpy's again at the other end.
"""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto import recorddict_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

__all__ = ["of_objects", "of_protobuf", "to_objects", "to_protobuf"]


def _records(obj):
    arrays = {name: Array(array) for name, array in obj["weights"].items()}
    words = ConfigRecord({"round": obj["round"], **obj["metrics"]})
    return RecordDict({"weights": ArrayRecord(arrays), "words": words})


def _object(records):
    words = dict(records["words"])
    return {
        "round": words.pop("round"),
        "weights": {name: array.numpy() for name, array in records["weights"].items()},
        "metrics": words,
    }


def to_protobuf(obj):
    return recorddict_to_proto(_records(obj)).SerializeToString()


def of_protobuf(body):
    return _object(recorddict_from_proto(recorddict_pb2.RecordDict.FromString(body)))


def to_objects(obj):
    """The name of the first, and all by name."""
    records = _records(obj)
    nested = get_all_nested_objects(records)
    return records.object_id, {name: each.deflate() for name, each in nested.items()}


def of_objects(body):
    first, contents = body
    return _object(inflate_object_from_contents(first, contents))
