"""What people and programs see: how things are said and tabulated, progress, and the printed results of commands."""
