"""SAC of a peer, in the peer's own environment: `python peer.py sb3|sbx SETTINGS`.

The last line is one JSON object: steps of the environment in the window, each with one
update, its `seconds`, and with episodes to play the mean return of these.
"""

import json
import os
import sys
import time

import gymnasium

# pyright: reportMissingImports=false


def main(name: str, settings: dict) -> None:
    """Learn until the policy is warm, then for the window, and print what was done."""
    if name == "sb3":
        import torch
        from stable_baselines3 import SAC

        torch.set_num_threads(os.cpu_count() or 1)
    else:
        from sbx import SAC
    from stable_baselines3.common.callbacks import BaseCallback

    class Window(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.begun = self.ended = 0
            self.began_s = self.ended_s = 0.0

        def _on_step(self) -> bool:
            now_s = time.perf_counter()
            if not self.begun and self.num_timesteps >= settings["warm_steps"]:
                self.begun, self.began_s = self.num_timesteps, now_s
            self.ended, self.ended_s = self.num_timesteps, now_s
            return not self.begun or now_s < self.began_s + settings["seconds"]

    model = SAC(
        "MlpPolicy",
        gymnasium.make(settings["env"]),
        policy_kwargs={"net_arch": [settings["hidden"]] * 2},
        batch_size=settings["batch_size"],
        train_freq=1,
        gradient_steps=1,
        learning_starts=settings["batch_size"],
        seed=0,
    )
    window = Window()
    model.learn(10**9, callback=window)
    found = {
        "steps": window.ended - window.begun,
        "seconds": window.ended_s - window.began_s,
    }
    if settings["episodes"]:
        from stable_baselines3.common.evaluation import evaluate_policy

        returns, _ = evaluate_policy(
            model, gymnasium.make(settings["env"]), n_eval_episodes=settings["episodes"]
        )
        found["return"] = float(returns)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
