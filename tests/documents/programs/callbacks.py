import sys

from rl_algorithms import SFTTrainer
from rl_algorithms.trainers.callbacks import Callback


class LoggingCallback(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step % 100 == 0:
            print(f"Step {step}: loss={metrics['loss']:.4f}")


class MyCallback(Callback):
    def on_epoch_end(self, trainer, epoch, metrics):
        print(f"Epoch {epoch}: {metrics['loss']}")


data = [{"prompt": f"{n} ", "response": "yes"} for n in range(100)]
trainer = SFTTrainer.from_pretrained(
    sys.argv[1], train_global_batch_size=1, max_num_epochs=2
)
trainer.fit(data, callbacks=[LoggingCallback(), MyCallback()])
