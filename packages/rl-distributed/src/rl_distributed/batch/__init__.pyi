from .batched_data_dict import (
    AnyRows as AnyRows,
    BatchedDataDict as BatchedDataDict,
    DynamicBatchingArgs as DynamicBatchingArgs,
    SequencePackingArgs as SequencePackingArgs,
    SlicedDataDict as SlicedDataDict,
)
from .packing import (
    PackingAlgorithm as PackingAlgorithm,
    SequencePacker as SequencePacker,
    get_packer as get_packer,
)
