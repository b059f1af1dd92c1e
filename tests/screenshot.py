"""Draws docs/page.png: the page as a person sees it in the middle of a round. Run it by itself."""

import base64
import contextlib
import tempfile
import threading
from pathlib import Path

import numpy as np

import weighlock
from process.browser import browser

PICTURE = Path(__file__).parent.parent / "docs" / "page.png"
SHAPES = {
    "self_attn.q_proj": (512, 512),
    "self_attn.k_proj": (128, 512),
    "self_attn.v_proj": (128, 512),
    "self_attn.o_proj": (512, 512),
    "mlp.gate_proj": (1408, 512),
    "mlp.up_proj": (1408, 512),
    "mlp.down_proj": (512, 1408),
}


def model():
    rng, bf16 = np.random.default_rng(0), weighlock.DType.BF16.numpy
    arrays = {"embed_tokens.weight": rng.standard_normal((4096, 512)).astype(bf16)}
    for n in range(12):
        for part, shape in SHAPES.items():
            weight = rng.laplace(scale=0.02, size=shape).astype(bf16)
            arrays[f"layers.{n}.{part}.weight"] = weight
        arrays[f"layers.{n}.input_layernorm.weight"] = np.ones(512, np.float32)
    return {f"model.{name}": array for name, array in arrays.items()}


def fetch(url, abort, rate):
    with contextlib.suppress(weighlock.WeighlockError):
        weighlock.fetch(url, abort=abort, limit_rate=rate, connections=1)


def main():
    abort, sites = weighlock.Abort(), ("site-berlin", "site-lyon", "site-oslo")
    with (
        tempfile.TemporaryDirectory() as directory,
        weighlock.Server(page=True) as server,
        browser(Path(directory)) as page,
    ):
        server.inbox(sites, into=Path(directory) / "in")
        share = server.share(model(), title="round-3.safetensors", receivers=sites)
        slow = threading.Thread(target=fetch, args=(share.url_for(sites[1]), abort, 9e6))
        slow.start()
        fetch(share.url_for(sites[0]), None, None)
        page.resize(1280, 880)
        page.open(server.page_url)
        page.wait_for("embed_tokens", "#tree")
        page.type("#search", "layers.7 proj")
        page.wait_for("7 tensors found", "#found")
        page.click("#tree .row")
        page.wait_for("zeros", "#tree .panel")
        page.wait_for("%", "#receivers li[data-key='site-lyon']")
        page.wait_for("MB", "#receivers li[data-key='site-lyon']")
        page.run("document.activeElement.blur()")
        picture = page.devtools("Page.captureScreenshot", format="png")["data"]
        PICTURE.write_bytes(base64.b64decode(picture))
        abort.set("the picture is taken")
        slow.join()


if __name__ == "__main__":
    main()
