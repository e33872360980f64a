"""The served models, and how a task call runs on one."""
