"""The machine's limits, measured: products of registers, and reading of memory."""

import ctypes
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("limits.c")


class Limits:
    """Rates of several threads at once; each measurement takes some milliseconds.

    Attributes:
        threads: how many threads work.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "limits.so"
            flags = ["-O3", "-march=native", "-shared", "-fPIC"]
            subprocess.run(["cc", *flags, str(SOURCE), "-o", str(target)], check=True)
            self._library = ctypes.CDLL(str(target))
        for name in ("int8_products", "bfloat16_products", "bytes_read"):
            getattr(self._library, name).restype = ctypes.c_int64

    def _rate(self, work) -> float:
        """What all threads do in a nanosecond, from the start of the first to the end of the last."""
        barrier = threading.Barrier(self.threads)
        done, spans = [0] * self.threads, [(0, 0)] * self.threads

        def run(i: int) -> None:
            barrier.wait()
            start = time.perf_counter_ns()
            done[i] = work(i)
            spans[i] = (start, time.perf_counter_ns())

        workers = [threading.Thread(target=run, args=(i,)) for i in range(self.threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(done) / (max(end for _, end in spans) - min(start for start, _ in spans))

    def products(self, kind: str) -> float:
        """Products of registers in a nanosecond; kind: int8 or bfloat16."""
        function = getattr(self._library, f"{kind}_products")
        return self._rate(lambda i: function(ctypes.c_int64(400_000)))

    def reading(self, memory: np.ndarray) -> float:
        """Bytes in a nanosecond, each thread reading a part of `memory`, several times over."""
        part = (memory.nbytes - 64) // self.threads // 4096 * 4096
        rounds = max(1, (256 << 20) // memory.nbytes)

        def read(i: int) -> int:
            address = ctypes.c_void_p((memory.ctypes.data + 63) // 64 * 64 + i * part)
            return self._library.bytes_read(address, ctypes.c_int64(part), ctypes.c_int64(rounds))

        return self._rate(read)
