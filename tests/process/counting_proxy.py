"""Passes a port on and counts what comes back: what an owner really sent, and was asked for."""

import contextlib
import re
import socket
import threading

__all__ = ["counting_proxy"]


@contextlib.contextmanager
def counting_proxy(port, asked=None, most=None):
    """Gives the port to dial instead, and a function that tells the bytes so far.

    To a list `asked`, the first and last byte of every range that is asked for is added. Who asks
    for more than `most` bytes is answered as by a gateway that could not have them.
    """
    total, threads, socks = [0], [], []
    lock = threading.Lock()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def pump(source, target, counted):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                if counted:
                    with lock:
                        total[0] += len(data)
                elif asked is not None:  # a request comes in one piece
                    found = re.findall(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)\r", data)
                    ranges = [(int(first), int(last)) for first, last in found]
                    asked.extend(ranges)
                    if most is not None and any(last - first >= most for first, last in ranges):
                        source.sendall(b"HTTP/1.1 502 Too large\r\nContent-Length: 0\r\n\r\n")
                        continue
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", port))
                socks.extend((near, far))
                for way in ((near, far, False), (far, near, True)):
                    threads.append(threading.Thread(target=pump, args=way))
                    threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1], lambda: total[0]
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        listener.close()
        accepting.join()
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in socks:
            sock.close()
