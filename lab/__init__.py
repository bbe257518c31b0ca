"""
The experiments: findings.md says what came out, README.md what each file does, and in which order
to read them. The lab imports the programs of the folder above it, and they don't import the lab.
"""
