"""Deadlines, processes that can be killed and a watchdog around code that scores responses."""
