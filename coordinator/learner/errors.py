"""What the learner refuses, as one tree; each error carries the `code` and `fatal` of its `Failed` answer.

LearnerError
├── RequestRefused      the request does not fit the learner's state (fence, step, order): nothing changed
├── BatchInvalid        the batch file is not what the request says it is: nothing changed
├── ModelRefused        the model directory cannot be trained here: a start with it ends the process
├── CheckpointInvalid   the checkpoint is not whole, or belongs to another job: a start with it ends the process
├── RanksRefused        the job asks for more ranks than the host has GPUs: a start with it ends the process
├── RankFailed          another rank could not do its part: nothing changed, and a learner started anew may do better
└── SinkMissing         the job names a sink for its figures whose package is not installed: a start with it ends the process
"""

from __future__ import annotations


class LearnerError(Exception):
    """Base. `fatal` says that a learner that fails to start with this is of no use; one that has started lives on."""

    code = "learner"
    fatal = True


class RequestRefused(LearnerError):
    """A request that must not be carried out now; `code` says which rule it breaks."""

    fatal = False

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BatchInvalid(LearnerError):
    """The file breaks BATCH_FORMAT, or is not the one the request names."""

    code = "bad_batch"
    fatal = False


class ModelRefused(LearnerError):
    """The directory holds no model of an allow-listed architecture, or not all of it."""

    code = "bad_model"


class CheckpointInvalid(LearnerError):
    """The checkpoint cannot be resumed exactly."""

    code = "bad_checkpoint"


class RanksRefused(LearnerError):
    """The host cannot hold the ranks that the job asks for."""

    code = "bad_ranks"


class RankFailed(LearnerError):
    """A file that this rank could read, another could not. The learner must be started anew."""

    code = "rank_failed"
    fatal = False


class SinkMissing(LearnerError):
    """The figures could not go where the job wants them."""

    code = "bad_sink"
