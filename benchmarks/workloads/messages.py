"""Objects as messages: all inline, by reference, back again, and through NVFlare's aggregation."""

import pickle
from dataclasses import dataclass

from benchmarks.contender import Bar, Contender, Job, Workload

__all__ = ["ALL"]

_URL = "http://127.0.0.1:8400/s/0123456789abcdef0123456789abcdef/model.safetensors"


@dataclass
class _Prepared:
    obj: dict
    body: object = b""
    count: int = 0
    refs: list = None
    server: object = None


def _object(job: Job):
    """200 tensors of 1 KB and 50 of 4 MB, with a few words around them."""
    import numpy as np

    quick = job.model.hidden < 1000
    rng = np.random.default_rng(0)
    small = {f"layer.{n}.bias": rng.random(256, np.float32) for n in range(20 if quick else 200)}
    large = {
        f"layer.{n}.weight": rng.random((16 if quick else 1024, 1024), np.float32)
        for n in range(5 if quick else 50)
    }
    return {"round": 3, "weights": small | large, "metrics": {"loss": 0.5, "site": "site-1"}}


def _prepare(dumps=None):
    def prepare(job: Job):
        import numpy as np

        _weighlock_parts({"a": np.ones(2)})  # imports are not what is measured
        if dumps is not None:
            return _Prepared(_object(job), dumps(_object(job)))
        return _Prepared(_object(job))

    return prepare


def _weighlock_parts(obj):
    import weighlock

    return weighlock.pack(obj, threshold_bytes=None).parts()


def _weighlock_body(obj):
    import weighlock

    return weighlock.pack(obj, threshold_bytes=None).seal()


def _pickle_body(obj):
    return pickle.dumps(obj, protocol=5)


def _pickle_parts(obj):
    """The message and its arrays, which stay where they are."""
    buffers = []
    body = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return [body, *(buffer.raw() for buffer in buffers)]


def _of_pickle_parts(parts):
    return pickle.loads(parts[0], buffers=parts[1:])


def _fobs():
    from nvflare.app_common.decomposers import common_decomposers, numpy_decomposers
    from nvflare.fuel.utils import fobs

    numpy_decomposers.register()
    common_decomposers.register()
    return fobs


def _fobs_body(obj):
    return _fobs().dumps(obj)


def _flower():
    from benchmarks.workloads import flower

    return flower


def _prepare_flower(pack):
    def prepare(job: Job):
        import numpy as np

        getattr(_flower(), pack)({"round": 3, "weights": {"a": np.ones(2)}, "metrics": {}})
        return _Prepared(_object(job))

    return prepare


def _prepare_fobs(job: Job):
    import numpy as np

    _fobs_body({"a": np.ones(2)})
    return _Prepared(_object(job))


def _copied(prepared):
    return b"".join([memoryview(array).cast("B") for array in prepared.obj["weights"].values()])


def _weighlock_unpack(body):
    import weighlock

    return weighlock.unpack(body)


def _check_object(job, prepared, found):
    import numpy as np

    expected = _object(job)
    assert found["round"] == 3
    assert found["metrics"] == expected["metrics"]
    for name, array in expected["weights"].items():
        got = found["weights"][name]
        got = got.load() if hasattr(got, "load") else got
        assert np.array_equal(got, array), name


_INLINE = Workload(
    "message-inline",
    "Pack 200 tensors of 1 KB and 50 of 4 MB, all inline",
    (
        Contender("bytes.join of the arrays", _copied, _prepare()),
        Contender(
            "pickle protocol 5",
            lambda prepared: _pickle_body(prepared.obj),
            _prepare(),
            lambda job, prepared, body: _check_object(job, prepared, pickle.loads(body)),
        ),
        Contender(
            "pickle protocol 5, arrays out of band",
            lambda prepared: _pickle_parts(prepared.obj),
            _prepare(),
            lambda job, prepared, parts: _check_object(job, prepared, _of_pickle_parts(parts)),
        ),
        Contender(
            "NVFlare 2.9 FOBS",
            lambda prepared: _fobs_body(prepared.obj),
            _prepare_fobs,
            lambda job, prepared, body: _check_object(job, prepared, _fobs().loads(body)),
            ("nvflare",),
        ),
        Contender(
            "Flower 1.41 RecordDict, one protobuf",
            lambda prepared: _flower().to_protobuf(prepared.obj),
            _prepare_flower("to_protobuf"),
            lambda job, prepared, body: _check_object(job, prepared, _flower().of_protobuf(body)),
            ("flwr",),
        ),
        Contender(
            "Flower 1.41 RecordDict, objects as it sends them",
            lambda prepared: _flower().to_objects(prepared.obj),
            _prepare_flower("to_objects"),
            lambda job, prepared, body: _check_object(job, prepared, _flower().of_objects(body)),
            ("flwr",),
        ),
        Contender(
            "weighlock, joined body",
            lambda prepared: _weighlock_body(prepared.obj),
            _prepare(),
            lambda job, prepared, body: _check_object(job, prepared, _weighlock_unpack(body)),
        ),
        Contender(
            "weighlock, parts for sendmsg",
            lambda prepared: _weighlock_parts(prepared.obj),
            _prepare(),
            lambda job, prepared, parts: _check_object(
                job, prepared, _weighlock_unpack(b"".join(parts))
            ),
        ),
    ),
    (
        Bar("weighlock, joined body", "pickle protocol 5", 2),
        Bar("weighlock, joined body", "NVFlare 2.9 FOBS", 3),
    ),
    memory_bars={"weighlock, parts for sendmsg": 2},
    wall_bars={"weighlock, parts for sendmsg": 0.005},
    fills_memory=True,
)

_UNPACK = Workload(
    "message-unpack",
    "Unpack the same message",
    (
        Contender(
            "pickle protocol 5",
            lambda prepared: pickle.loads(prepared.body),
            _prepare(_pickle_body),
            _check_object,
        ),
        Contender(
            "pickle protocol 5, arrays out of band",
            lambda prepared: _of_pickle_parts(prepared.body),
            _prepare(_pickle_parts),
            _check_object,
        ),
        Contender(
            "NVFlare 2.9 FOBS",
            lambda prepared: _fobs().loads(prepared.body),
            _prepare(_fobs_body),
            _check_object,
            ("nvflare",),
        ),
        Contender(
            "Flower 1.41 RecordDict, one protobuf",
            lambda prepared: _flower().of_protobuf(prepared.body),
            _prepare(lambda obj: _flower().to_protobuf(obj)),
            _check_object,
            ("flwr",),
        ),
        Contender(
            "Flower 1.41 RecordDict, objects as it sends them",
            lambda prepared: _flower().of_objects(prepared.body),
            _prepare(lambda obj: _flower().to_objects(obj)),
            _check_object,
            ("flwr",),
        ),
        Contender(
            "weighlock",
            lambda prepared: _weighlock_unpack(prepared.body),
            _prepare(_weighlock_body),
            _check_object,
        ),
    ),
    memory_bars={"weighlock": 2},
    wall_bars={"weighlock": 0.005},
    fills_memory=True,
)


def _by_reference(prepared):
    import weighlock

    body = weighlock.pack(prepared.obj).seal(_URL)
    return body, weighlock.unpack(body)


def _check_offered(job, prepared, result):
    body, found = result
    assert len(body) <= 300_000, len(body)
    assert found["weights"]["layer.0.weight"].source.ticket == _URL


def _prepare_refs(count):
    def prepare(job: Job):
        import numpy as np

        prepared = _prepare()(job)
        prepared.count = count // 10 if job.model.hidden < 1000 else count
        prepared.refs = {
            f"model.layers.{n}.self_attn.q_proj.weight": np.zeros(4, np.float32)
            for n in range(prepared.count)
        }
        return prepared

    return prepare


def _refs_there_and_back(prepared):
    import weighlock

    body = weighlock.pack(prepared.refs, threshold_bytes=0).seal(_URL)
    return body, weighlock.unpack(body)


def _check_refs(job, prepared, result):
    import weighlock

    body, found = result
    assert len(body) <= 120 * prepared.count, len(body) / prepared.count
    assert len(found) == prepared.count
    assert weighlock.pack(found).seal() == body


_REFERENCE = Workload(
    "message-refs",
    "Pack and unpack by reference",
    (
        Contender("the message above (≤ 300 KB)", _by_reference, _prepare(), _check_offered),
        Contender(
            "10,000 refs (≤ 120 bytes each)",
            _refs_there_and_back,
            _prepare_refs(10_000),
            _check_refs,
        ),
        Contender(
            "40,000 refs (≤ 120 bytes each)",
            _refs_there_and_back,
            _prepare_refs(40_000),
            _check_refs,
        ),
    ),
    # Linear: four times as many take about four times as long; if it were quadratic, sixteen times.
    (Bar("40,000 refs (≤ 120 bytes each)", "10,000 refs (≤ 120 bytes each)", 0.125),),
    memory_bars={"10,000 refs (≤ 120 bytes each)": 64},
)


def _prepare_arrays(job: Job):
    import nvflare.app_common.aggregators.weighted_aggregation_helper  # noqa: F401

    return _prepare()(job)


def _prepare_aggregation(job: Job):
    import weighlock

    prepared = _prepare_arrays(job)
    prepared.server = weighlock.Server()
    packed = prepared.server.pack(prepared.obj)
    access = weighlock.Access(allow=["127.0.0.1"])
    prepared.refs = [weighlock.unpack(packed.body, access=access) for _ in range(3)]
    return prepared


def _aggregate(contributions):
    from nvflare.app_common.aggregators.weighted_aggregation_helper import (
        WeightedAggregationHelper,
    )

    aggregation = WeightedAggregationHelper()
    for number, weights in enumerate(contributions):
        aggregation.add(weights, number + 1.0, f"site-{number}", 0)
    return aggregation.get_result()


def _check_mean(job, prepared, result):
    import numpy as np

    for name, array in _object(job)["weights"].items():
        assert np.allclose(result[name], array), name


_AGGREGATE = Workload(
    "message-aggregate",
    "NVFlare's WeightedAggregationHelper, unchanged, over three contributions",
    (
        Contender(
            "arrays in memory",
            lambda prepared: _aggregate([prepared.obj["weights"]] * 3),
            _prepare_arrays,
            _check_mean,
            ("nvflare",),
        ),
        Contender(
            "weighlock's refs, pulled by materialize()",
            lambda prepared: _aggregate([refs["weights"] for refs in prepared.refs]),
            _prepare_aggregation,
            _check_mean,
            ("nvflare",),
        ),
    ),
)

ALL = (_INLINE, _UNPACK, _REFERENCE, _AGGREGATE)
