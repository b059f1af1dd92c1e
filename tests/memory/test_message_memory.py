"""Peak memory of messages: many refs, large tensors that ride along, hostile trees, forwarding."""

import pytest

from memory.measuring import MB, added_by

pytestmark = pytest.mark.memory

_BEFORE = """
weighlock.unpack(weighlock.pack({"a": np.ones(2)}).seal())  # imports
URL = "http://127.0.0.1:9/s/" + 32 * "0" + "/model.safetensors"
"""


def test_ten_thousand_refs_pack_and_unpack_in_little(tmp_path):
    """D9: at most 64 MB, 120 bytes a ref."""
    script = """
tensors = {f"model.layers.{n}.self_attn.q_proj.weight": np.zeros(4) for n in range(10_000)}
with measured():
    body = weighlock.pack(tensors, threshold_bytes=0).seal(URL)
    assert len(body) <= 120 * 10_000, len(body)
    found = weighlock.unpack(body)
    assert weighlock.pack(found).seal() == body
"""
    (added,) = added_by(_BEFORE + script, tmp_path)
    assert added <= 64 * MB


def test_what_rides_along_is_not_copied(tmp_path):
    script = """
tensors = {str(n): np.ones(1_000_000) for n in range(25)}
with measured():
    parts = weighlock.pack(tensors, threshold_bytes=None).parts()
body = b"".join(parts)
with measured():
    found = weighlock.unpack(body)
    assert found["24"][-1] == 1
"""
    packing, unpacking = added_by(_BEFORE + script, tmp_path)
    assert packing <= 4 * MB
    assert unpacking <= 4 * MB


@pytest.mark.parametrize(
    "root",
    ["b'\\xdd' + (999_000).to_bytes(4, 'big') + b'\\x90' * 999_000", "b'\\x91' * 4_000_000"],
    ids=["as many empty lists as may be", "too deep"],
)
def test_a_hostile_tree_costs_little(tmp_path, root):
    """E7: a tree of any kind takes what its limits allow, and not what it announces."""
    script = f"""
root = {root}
tree = b"\\x99" + b"\\x90" * 8 + root
body = b"\\x89WLM\\x01\\0\\0\\0" + len(tree).to_bytes(4, "little") + bytes(4) + tree
with measured():
    try:
        weighlock.unpack(body)
    except weighlock.WeighlockError:
        pass
"""
    (added,) = added_by(_BEFORE + script, tmp_path)
    assert added <= 128 * MB


def test_a_forwarder_stays_flat(tmp_path):
    """D10: what is passed on is never held, however large it is."""
    script = """
import json, subprocess
owner = subprocess.Popen(
    [sys.executable, "-c", '''
import sys
import numpy as np
import weighlock
with weighlock.Server() as server:
    packed = server.pack({str(n): np.full(4_000_000, float(n)) for n in range(5)})
    print(packed.body.hex(), flush=True)
    sys.stdin.read()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
body = bytes.fromhex(owner.stdout.readline())
access = weighlock.Access(allow=["127.0.0.1"])
weighlock.unpack(body, access=access)["0"][:1]
with weighlock.Server() as server:
    server.pack({"small": np.ones(20_000)})
    with measured():
        for _ in range(20):
            message = weighlock.unpack(body, access=access)
            message["mine"] = np.ones(20_000)
            packed = server.pack(message)
            assert message["3"][123] == 3
            packed.share.revoke()
owner.stdin.close()
owner.wait()
"""
    (added,) = added_by(_BEFORE + script, tmp_path)
    assert added <= 16 * MB
