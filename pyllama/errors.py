"""The exception tree. One `except` clause catches everything below its line:

PyllamaError
 +- GgufError          the file is not a valid GGUF file; the message names the fault
 +- ModelError         a valid file that is not a usable model (missing tensor, wrong shape, unsupported architecture)
 +- TokenizerError     the vocabulary in the file cannot be used
 +- TemplateError      the chat template is invalid, refused the messages, or reached for something it may not
 +- DeviceError        a device or its driver failed
 +- OutOfMemory        an allocation failed; also a `MemoryError`
 +- ContextFull        no KV pages are left for a sequence; `seq_id` names it
 +- DownloadError      a file cannot be fetched, or what came is not that file
 +- InvalidArgument    a value the caller passed is out of range; also a `ValueError`
"""


class PyllamaError(Exception):
    """Base of every error this package raises on purpose."""


class GgufError(PyllamaError):
    pass


class ModelError(PyllamaError):
    pass


class TokenizerError(PyllamaError):
    pass


class TemplateError(PyllamaError):
    pass


class DeviceError(PyllamaError):
    pass


class OutOfMemory(PyllamaError, MemoryError):
    pass


class ContextFull(PyllamaError):
    def __init__(self, message: str, seq_id: int = -1) -> None:
        super().__init__(message)
        self.seq_id = seq_id


class DownloadError(PyllamaError):
    pass


class InvalidArgument(PyllamaError, ValueError):
    pass
