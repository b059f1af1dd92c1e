"""The other side of a transfer: `python -m benchmarks.owners KIND COUNT BYTES DIRECTORY HOST`.

Holds a model of equal tensors in memory, offers it in one of several ways, prints where, and stays
until its input ends.
"""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

__all__ = ["KINDS", "Owner", "bf16", "certificate", "make_arrays"]


def make_arrays(count, nbytes):
    """name → uint16 array of bf16 bits; every tensor different."""
    import numpy as np

    table = np.random.default_rng(5).integers(0x3C00, 0x3FFF, 1 << 20, dtype=np.uint16)
    arrays = {}
    for number in range(count):
        array = np.empty(nbytes // 2, np.uint16)
        rolled = np.roll(table, 4099 * number) if nbytes > 1 << 20 else table[number % 4099 :]
        for first in range(0, array.size, rolled.size):
            part = array[first : first + rolled.size]
            part[:] = rolled[: part.size]
        array[0] = number % 0x3FFF
        arrays[f"layer.{number}.weight"] = array
    return arrays


def bf16(arrays):
    import ml_dtypes

    return {name: array.view(ml_dtypes.bfloat16) for name, array in arrays.items()}


def certificate(directory):
    """A certificate for this machine that only this run trusts."""
    cert, key = (os.path.join(directory, name) for name in ("cert.pem", "key.pem"))
    if not os.path.exists(cert):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", key, "-out", cert),
            ],
            check=True,
            capture_output=True,
        )
    return cert, key


def _raw(arrays, directory, host, *, tls=False, hashes=False):
    """Answers 16 bytes (offset, length) with that part of the tensors laid end to end."""
    from blake3 import blake3

    views = [memoryview(array.view("u1")) for array in arrays.values()]
    size = len(views[0])
    listener = socket.create_server((host, 0))
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate(directory))

    def serve(sock):
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            asked = b""
            while len(asked) < 16:
                more = sock.recv(16 - len(asked))
                if not more:
                    return
                asked += more
            offset, length = (int.from_bytes(asked[i : i + 8], "little") for i in (0, 8))
            step = 1 << 20 if hashes else 8 << 20
            while length:
                number, first = divmod(offset, size)
                part = views[number][first : first + min(length, step)]
                if hashes:
                    blake3(part).digest()
                sock.sendall(part)
                offset, length = offset + len(part), length - len(part)

    def accept():
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return {"host": host, "port": listener.getsockname()[1]}


def _server(host, **options):
    import weighlock

    # Away from loopback only for who spells it out; the way there is a namespace of our own.
    return weighlock.Server(host, insecure=host != "127.0.0.1", **options)


def _weighlock(arrays, directory, host, tls):
    options = {}
    if tls:
        options = dict(zip(("tls_cert", "tls_key"), certificate(directory), strict=True))
    server = _server(host, **options)
    return {"url": server.share(bf16(arrays)).url}


def _nvflare(arrays, host, receivers=1):
    import torch
    from nvflare.app_opt.pt.tensor_downloader import add_tensors
    from nvflare.fuel.f3.cellnet.cell import Cell
    from nvflare.fuel.f3.streaming.obj_downloader import ObjectDownloader

    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    url = f"tcp://{host}:{port}"
    cell = Cell(fqcn="server", root_url=url, secure=False, credentials={})
    cell.start()
    tensors = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in arrays.items()}
    downloader = ObjectDownloader(cell=cell, timeout=600.0, num_receivers=receivers)
    return {"url": url, "ref": add_tensors(downloader, tensors, 2 * 1024 * 1024)}


def _weighlock_file(path):
    import weighlock

    return {"url": weighlock.Server().share(weighlock.open(path)).url}


def _later(arrays):
    """Says that it is ready, and shares when it is told to."""
    import weighlock

    server, tensors = weighlock.Server(), bf16(arrays)
    print(json.dumps({"url": ""}), flush=True)
    sys.stdin.readline()
    return {"url": server.share(tensors).url}


_WORKERS = 2

_NGINX = """
daemon off;
worker_processes {workers};
pid {place}/nginx.pid;
error_log {place}/error.log;
{user}
events {{}}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    client_body_temp_path {place}/body;
    proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
    server {{ listen {host}:{port}; root {place}; }}
}}
"""


def _nginx(arrays, directory, host):
    """A file of the tensors, served by nginx; it ends with this process."""
    import weighlock

    place = os.path.join(directory, "nginx")
    os.makedirs(place, exist_ok=True)
    weighlock.save(os.path.join(place, "model.safetensors"), bf16(arrays), durable=False)
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    user = "user root;" if os.geteuid() == 0 else ""  # its workers would not see the directory
    config = os.path.join(place, "nginx.conf")
    with open(config, "w") as file:
        file.write(_NGINX.format(place=place, host=host, port=port, user=user, workers=_WORKERS))
    process = subprocess.Popen(["nginx", "-e", f"{place}/error.log", "-c", config])
    while True:
        try:
            socket.create_connection((host, port)).close()
            break
        except ConnectionRefusedError:
            if process.poll() is not None:
                raise
            time.sleep(0.02)
    workers = []
    while len(workers) < _WORKERS and process.poll() is None:  # it listens before it has them
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            workers = [int(pid) for pid in children.read().split()]
    pids = [process.pid, *workers]
    size = os.path.getsize(os.path.join(place, "model.safetensors"))
    return {"url": f"http://{host}:{port}/model.safetensors", "size": size, "pids": pids}


def _inbox(directory, host):
    inbox = _server(host).inbox("a", into=os.path.join(directory, "in"), durable=False)
    return {"url": inbox.url_for("a")}


KINDS = {
    "weighlock-file": lambda _, path, host: _weighlock_file(path),
    "raw": _raw,
    "raw-hashing": lambda arrays, place, host: _raw(arrays, place, host, hashes=True),
    "raw-tls": lambda arrays, place, host: _raw(arrays, place, host, tls=True),
    "weighlock": lambda arrays, place, host: _weighlock(arrays, place, host, tls=False),
    "weighlock-tls": lambda arrays, place, host: _weighlock(arrays, place, host, tls=True),
    "weighlock-later": lambda arrays, place, host: _later(arrays),
    "inbox": lambda arrays, place, host: _inbox(place, host),
    "nginx": _nginx,
    "nvflare": lambda arrays, place, host: _nvflare(arrays, host),
    "nvflare-8": lambda arrays, place, host: _nvflare(arrays, host, receivers=8),
}


class Owner:
    """An owner in a process of its own, here or at the far end of a line.

    `address` is what it printed, `pids` are the processes that work for it.
    """

    def __init__(self, kind, count, nbytes, directory, far=None):
        self._far = far
        self._process = subprocess.Popen(
            [
                *(far.prefix if far else ()),
                *(sys.executable, "-m", "benchmarks.owners", kind, str(count), str(nbytes)),
                *(directory, far.host if far else "127.0.0.1"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._told()
        self.pid = self._process.pid
        self.pids = [self.pid, *self.address.get("pids", ())]

    def go_on(self):
        """Let it do what it waits with; `address` is what it prints then."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.address = self._told()

    def _told(self):
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):
            line = self._process.stdout.readline()
        told = json.loads(line)
        return self._far.reached(told) if self._far else told


def main():
    kind, count, nbytes, directory, host = sys.argv[1:]
    arrays = make_arrays(int(count), int(nbytes))
    told = KINDS[kind](arrays, directory, host)
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    for pid in told.get("pids", ())[:1]:
        os.kill(pid, signal.SIGTERM)
    os._exit(0)  # NVFlare's pools are not daemon threads


if __name__ == "__main__":
    main()
