"""What pytest must not collect here."""

# To be imported in the ranks only: it imports the host, which would map torch.cuda in the test
# process.
collect_ignore = ["core_contract.py"]
