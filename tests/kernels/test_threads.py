"""The pool and executors: the same bits on any number of threads, and nothing that hangs."""

import ctypes
import os
import queue
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import policy_kernels as pk
from policy_kernels import _loader

E4 = "float8_e4m3fn"


@pytest.fixture
def threads():
    """Gives set_num_threads; the default comes back afterwards."""
    yield pk.set_num_threads
    pk.set_num_threads(None)


def operands(m, n=700, k=1500):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), np.float32)
    codes = rng.integers(-127, 128, (n, k), np.int8)
    return x, pk.pack(codes), rng.uniform(0.1, 1, n).astype(np.float32)


def test_the_number_of_threads_can_be_asked_for(threads):
    """An asked-for number holds until None brings the default back."""
    threads(None)
    before = pk.num_threads()
    threads(3)
    assert pk.num_threads() == 3
    assert pk.build_info().threads == 3
    threads(None)
    assert pk.num_threads() == before


def test_the_default_is_what_affinity_leaves():
    """With one CPU allowed there is one thread; POLICY_NUM_THREADS goes before, a call before that."""
    code = """
import os, policy_kernels as pk
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(pk.num_threads())
"""
    environment = {
        name: value for name, value in os.environ.items() if name != "POLICY_NUM_THREADS"
    }
    for extra, expected in (({}, "1"), ({"POLICY_NUM_THREADS": "7"}, "7")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | extra, capture_output=True, check=True
        )
        assert done.stdout.decode().strip() == expected


@pytest.mark.parametrize("m", [1, 2, 33, 300])
def test_any_number_of_threads_gives_the_same_bits(isa, threads, m):
    """Work is cut differently, sums are not."""
    x, weight, scale = operands(m)
    threads(1)
    expected = [kernel(x, weight, scale) for kernel in (pk.linear_s8, pk.linear_s8w)]
    for count in (2, 4):
        threads(count)
        for kernel, wanted in zip((pk.linear_s8, pk.linear_s8w), expected, strict=True):
            y = kernel(x, weight, scale)
            np.testing.assert_array_equal(y.view(np.uint32), wanted.view(np.uint32))


def test_packing_on_many_threads_gives_the_same_bytes(threads):
    """A weight large enough to be packed in parallel."""
    codes = np.random.default_rng(0).integers(-127, 128, (1500, 1500), np.int8)
    for count in (1, 4):
        threads(count)
        np.testing.assert_array_equal(pk.pack(codes).unpack(), codes)


def test_many_callers_at_once_get_their_results(threads):
    """More callers than threads, with products of several sizes."""
    threads(4)
    cases = [operands(m) for m in (1, 7, 40)]
    expected = [pk.linear_s8(*case) for case in cases]
    wrong = []

    def work(i):
        for j in range(40):
            case = (i + j) % 3
            if not np.array_equal(pk.linear_s8(*cases[case]), expected[case]):
                wrong.append((i, j))

    callers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert not wrong


def test_the_number_of_threads_may_change_while_others_call(threads):
    """Workers that are there already serve whoever asks."""
    case = operands(3)
    expected = pk.linear_s8(*case)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for count in (1, 2, 5):
                pk.set_num_threads(count)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(200):
            np.testing.assert_array_equal(pk.linear_s8(*case), expected)
    finally:
        stop.set()
        changer.join()


TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
SUBMIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


class Executor(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_int32),
        ("submit", SUBMIT),
        ("context", ctypes.c_void_p),
        ("run", RUN),
    )


def linear_s8(executor, x, weight, scale):
    m, k = x.shape
    y = np.empty((m, weight.n), np.float32)
    status = _loader.library().pk_linear_s8(
        ctypes.addressof(executor),
        m,
        weight.n,
        k,
        0,
        x.ctypes.data,
        k,
        weight._pointer,
        scale.ctypes.data,
        0,
        None,
        0,
        y.ctypes.data,
        weight.n,
    )
    assert status == 0
    return y


def run(task, argument):
    TASK(task)(argument)


@pytest.mark.parametrize("late", [False, True])
def test_an_executor_that_never_runs_in_time_cannot_hang_a_product(late):
    """The caller does all the work itself; tasks that run after the product find nothing to do."""
    x, weight, scale = operands(33)
    expected = pk.linear_s8(x, weight, scale)
    submitted = []

    def submit(_, task, argument):
        submitted.append((task, argument))

    executor = Executor(4, SUBMIT(submit), None)
    for _ in range(5):
        np.testing.assert_array_equal(linear_s8(executor, x, weight, scale), expected)
    assert submitted
    if late:
        for task, argument in submitted:
            run(task, argument)
        np.testing.assert_array_equal(linear_s8(executor, x, weight, scale), expected)


def test_an_executor_may_run_tasks_at_once_in_the_caller():
    """`submit` that calls the task before it returns."""
    x, weight, scale = operands(33)
    executor = Executor(4, SUBMIT(lambda _, task, argument: run(task, argument)), None)
    y = linear_s8(executor, x, weight, scale)
    np.testing.assert_array_equal(y, pk.linear_s8(x, weight, scale))


@pytest.mark.parametrize("times", [0, 1, 4])
def test_an_executor_that_forks_and_joins(times):
    """`run` that calls the task on threads of its own, or only in the caller, or not at all."""
    x, weight, scale = operands(33)
    asked = []

    def fork_and_join(_, count, task, argument):
        asked.append(count)
        threads = [threading.Thread(target=run, args=(task, argument)) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    executor = Executor(4, SUBMIT(), None, RUN(fork_and_join))
    for _ in range(5):
        y = linear_s8(executor, x, weight, scale)
        np.testing.assert_array_equal(y, pk.linear_s8(x, weight, scale))
    assert asked
    assert all(1 < count <= 4 for count in asked)


def test_products_nest_in_the_tasks_of_one_pool():
    """Every thread of a pool calls a product that uses this very pool, and all come back."""
    x, weight, scale = operands(5)
    expected = pk.linear_s8(x, weight, scale)
    jobs: queue.Queue = queue.Queue()
    results = []

    def worker():
        while (job := jobs.get()) is not None:
            job()

    submit = SUBMIT(lambda _, task, argument: jobs.put(lambda: run(task, argument)))
    executor = Executor(3, submit, None)

    def outer():
        results.append(linear_s8(executor, x, weight, scale))

    pool = [threading.Thread(target=worker) for _ in range(3)]
    for thread in pool:
        thread.start()
    for _ in range(12):
        jobs.put(outer)
    deadline = time.monotonic() + 60
    while len(results) < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in pool:
        jobs.put(None)
    for thread in pool:
        thread.join(60)
    assert len(results) == 12
    for y in results:
        np.testing.assert_array_equal(y, expected)


SCRIPT = """
import os, sys, threading, time
import numpy as np
import policy_kernels as pk

pk.set_num_threads(4)
rng = np.random.default_rng(0)
x = rng.standard_normal((40, 1500), np.float32)
weight = pk.pack(rng.integers(-127, 128, (700, 1500), np.int8))
scale = np.ones(700, np.float32)
expected = pk.linear_s8(x, weight, scale)
"""

FORK = """
def child_status():
    child = os.fork()
    if child == 0:
        same = all(np.array_equal(pk.linear_s8(x, weight, scale), expected) for _ in range(20))
        os._exit(0 if same else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for _ in range(5):
    assert child_status() == 0

# While other threads are in the middle of products:
stop = threading.Event()
def work():
    while not stop.is_set():
        pk.linear_s8(x, weight, scale)
busy = [threading.Thread(target=work) for _ in range(2)]
for thread in busy: thread.start()
statuses = [child_status() for _ in range(10)]
stop.set()
for thread in busy: thread.join()
assert statuses == [0] * 10, statuses
assert np.array_equal(pk.linear_s8(x, weight, scale), expected)
print("done")
"""

IDLE = """
time.sleep(0.2)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""


def output(script):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT + script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_products_work_in_the_child_of_a_fork():
    """After use, and while other threads are using the pool."""
    assert output(FORK) == "done"


def test_idle_threads_use_no_processor():
    """Half a second after the last product the pool has used next to nothing of it."""
    assert float(output(IDLE)) < 0.05


def test_a_process_may_end_while_the_pool_sleeps_or_works():
    """Neither sleeping workers nor a product in another thread keep or crash it."""
    assert output("print('done')") == "done"
    daemon = """
def work():
    while True: pk.linear_s8(x, weight, scale)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
print("done", flush=True)
os._exit(0)
"""
    assert output(daemon) == "done"
