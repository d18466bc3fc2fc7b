import sys

from my_algorithm import MyAlgoTrainer

from rl_algorithms import DataConfig, DataModule
from rl_models.tokens.tokenizer import load_tokenizer

model = sys.argv[1]
config = {"policy": {"model_name": model}, "myalgo": {"my_param": 2.0}}
rows = [{"prompt": f"{n} ", "response": "yes"} for n in range(4)]
data = DataModule(
    DataConfig(),
    load_tokenizer(model),
    kind="demonstrations",
    batch_size=4,
    train=rows,
)
batch = next(iter(data.train_loader))


class TestMyAlgoTrainer:
    def test_train_step_returns_loss(self):
        trainer = MyAlgoTrainer(config)
        result = trainer._train_step(batch)
        assert "loss" in result
        return trainer, result


trainer, result = TestMyAlgoTrainer().test_train_step_returns_loss()
