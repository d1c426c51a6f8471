"""Every setting of the program, in sections. No torch, no files, no derived values.

A section states its limits and its documentation; validators refuse, they never rewrite. Variants
are classes with a `kind`, joined in tagged unions. A value has one home; code that builds
something receives its own section, never the whole `Config`.
"""

from multimodal.config.base import (
    Section,
    parse_duration,
)
from multimodal.config.data import (
    Augment,
    Data,
    FolderSource,
    HubSource,
    MixtureSource,
    ShardsSource,
    Source,
    StreamSource,
    TableSource,
    TrainSource,
)
from multimodal.config.evaluation import (
    EMA_SUFFIX,
    EvaluateConfig,
    Evaluation,
    Retrieval,
    ZeroShot,
)
from multimodal.config.model import (
    BpeTokenizer,
    Cleaning,
    Encoder,
    HfImage,
    HfText,
    HfTokenizer,
    ImageTower,
    Model,
    OpenAiTokenizer,
    PartName,
    Preprocess,
    RunModel,
    TextTower,
    TimmImage,
    TokenizerSection,
    TransformerText,
    VitImage,
)
from multimodal.config.optim import Optim, ParameterGroup
from multimodal.config.run import (
    Best,
    Card,
    Checkpoint,
    Config,
    ContrastiveSection,
    DuplicatesMode,
    Log,
    Loss,
    SigmoidSection,
    Train,
    Wandb,
)
