"""Ways to run shard jobs. An engine is a function: jobs in, results out, in any order it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from kimik3_prep.threads import ImageThreads
from kimik3_prep.work import Control, ShardJob, ShardResult, materialize_shard, start_worker


def run_local(jobs: Iterable[ShardJob], workers: int, in_flight: int, control: Control) -> Iterator[ShardResult]:
    """Run jobs on `workers` image threads of this process; Pillow and torch release the interpreter lock.

    in_flight: shards at a time. With two, one fills while the other is written out; memory holds as many buffers.

    Yields results in job order. Whatever ends the iteration early (an error, Ctrl-C, a closed generator) stops the
    jobs in flight at their next image and waits for them, for a decoder that does not return two seconds at most.
    """
    with (
        ImageThreads(workers, "image", control.item_timeout, control.stop, start_worker) as images,
        ThreadPoolExecutor(in_flight, "shard", start_worker) as shards,
    ):
        pending: deque[Future[ShardResult]] = deque()
        try:
            for job in jobs:
                if len(pending) == in_flight:
                    yield pending.popleft().result()
                pending.append(shards.submit(materialize_shard, job, images, control))
            while pending:
                yield pending.popleft().result()
        except BaseException:
            control.stop.set()
            raise
