"""Ready-made training scripts, each runnable with `python -m decent_opt.recipes.NAME`."""
