from .collective import (
    CollectiveLink as CollectiveLink,
    CollectiveReceiver as CollectiveReceiver,
    CollectiveSender as CollectiveSender,
)
from .cuda_ipc import CudaIpcLink as CudaIpcLink
from .file import FileLink as FileLink
from .manifest import (
    Manifest as Manifest,
    TensorEntry as TensorEntry,
    digest_of as digest_of,
)
from .object_store import ObjectStoreLink as ObjectStoreLink
from .protocol import (
    Header as Header,
    ReceivingEnd as ReceivingEnd,
    SendingEnd as SendingEnd,
    TensorLink as TensorLink,
)
from .shared_memory import SharedMemoryLink as SharedMemoryLink
from .turns import LinkSet as LinkSet, TurnReceiver as TurnReceiver
from .verified_stream import (
    TensorStream as TensorStream,
    receive_tensors as receive_tensors,
    send_messages as send_messages,
    send_tensors as send_tensors,
)
