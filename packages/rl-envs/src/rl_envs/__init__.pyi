from .agents.environment import AgentEnvironment as AgentEnvironment
from .agents.functions import conversation as conversation
from .agents.tasks import AgentReward as AgentReward, AgentTask as AgentTask
from .environment_file import (
    FileEnvironment as FileEnvironment,
    FileEnvironmentConfig as FileEnvironmentConfig,
)
from .errors import (
    AgentError as AgentError,
    AgentSetupError as AgentSetupError,
    EnvironmentContractError as EnvironmentContractError,
    EnvsError as EnvsError,
    MessageLogError as MessageLogError,
    RewardCallError as RewardCallError,
    RewardError as RewardError,
    RewardSignatureError as RewardSignatureError,
    RewardValueError as RewardValueError,
    SolutionError as SolutionError,
    TaskError as TaskError,
    ToolError as ToolError,
    ToolUnavailableError as ToolUnavailableError,
)
from .interfaces import (
    EnvironmentInterface as EnvironmentInterface,
    EnvironmentReturn as EnvironmentReturn,
    Message as Message,
    MessageLog as MessageLog,
    Observation as Observation,
    last_response as last_response,
    observation_messages as observation_messages,
    prompt_text as prompt_text,
    scored_mask as scored_mask,
    total_reward as total_reward,
)
from .metrics import (
    calculate_pass_rate_per_prompt as calculate_pass_rate_per_prompt,
    reward_metrics as reward_metrics,
)
from .outcomes import (
    ConversationOutcome as ConversationOutcome,
    outcome_metrics as outcome_metrics,
    outcome_of as outcome_of,
)
from .registry import (
    create_env as create_env,
    env_registry as env_registry,
    register_env as register_env,
)
from .remote import RemoteEnvironment as RemoteEnvironment
from .reward_file import FileReward as FileReward, FileRewardConfig as FileRewardConfig
from .rewards.environments import (
    GroupRewardWrapper as GroupRewardWrapper,
    as_environment as as_environment,
)
from .rewards.functional import (
    FunctionalRewardWrapper as FunctionalRewardWrapper,
    check_reward_fn as check_reward_fn,
)
from .rewards.functions import (
    FormatReward as FormatReward,
    LengthPenalty as LengthPenalty,
    NumericMatch as NumericMatch,
    combine_reward_functions as combine_reward_functions,
    exact_match as exact_match,
    numeric_match as numeric_match,
)
from .rewards.lists import RewardList as RewardList
from .task_limits import TaskLimits as TaskLimits
from .tasks import Split as Split, Task as Task, TaskSource as TaskSource
from .testing import check_environment as check_environment
from .tools.calls import (
    JsonToolCallParser as JsonToolCallParser,
    ToolCall as ToolCall,
    ToolCallParser as ToolCallParser,
)
from .tools.environment import (
    ToolEnvironment as ToolEnvironment,
    ToolLimits as ToolLimits,
)
from .tools.functions import Tool as Tool
from .version import __version__ as __version__
from .worlds.calculator import (
    CalculatorConfig as CalculatorConfig,
    CalculatorEnvironment as CalculatorEnvironment,
    CalculatorTasks as CalculatorTasks,
)
from .worlds.math import MathConfig as MathConfig, MathEnvironment as MathEnvironment
from .worlds.sorting import (
    SortingConfig as SortingConfig,
    SortingEnvironment as SortingEnvironment,
    SortingTasks as SortingTasks,
)
