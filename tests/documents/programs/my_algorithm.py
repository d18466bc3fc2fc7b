import sys

from rl_algorithms import register_algorithm, train
from rl_algorithms.trainers.base import BaseTrainer

model = sys.argv[1]
dataset = [{"prompt": f"{n} ", "response": "yes"} for n in range(8)]


@register_algorithm("myalgo")
class MyAlgoTrainer(BaseTrainer):
    """My custom algorithm trainer."""

    @classmethod
    def _build_config_from_pretrained(cls, model, **kwargs):
        config = super()._build_config_from_pretrained(model, **kwargs)
        config["myalgo"] = {
            "my_param": kwargs.pop("my_param", 1.0),
        }
        return config

    def __init__(self, config):
        super().__init__(config)
        self._myalgo_config = config.get("myalgo", {})

    def _train_step(self, batch):
        # Your training logic
        loss_value = super()._train_step(batch)["loss"]
        return {"loss": loss_value}

    def _compute_loss(self, batch, outputs):
        # Your loss computation
        mask = batch["token_mask"]
        mean = (outputs["logprobs"] * mask).sum(1) / mask.sum(1)
        loss_tensor = -self._myalgo_config["my_param"] * mean.mean()
        return loss_tensor


if __name__ == "__main__":
    trainer = MyAlgoTrainer.from_pretrained(model, my_param=2.0, lr=1e-2)
    trainer.fit(dataset)
    by_name = train(model, dataset, algorithm="myalgo", my_param=-1.0)
