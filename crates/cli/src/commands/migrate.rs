//! `airtight migrate`.

use serde_json::json;

use crate::{args::MigrateArgs, errors::Outcome, output, wiring::Target};

pub(crate) async fn run(args: &MigrateArgs) -> Outcome {
    let mut target = Target::from_args(&args.database)?;
    if args.notify || args.no_notify {
        target.set_notify(args.notify)?;
    }
    if args.print {
        let sql = target.migration_sql();
        return output::line(sql.trim_end());
    }
    let steps = target.create().await?.admin().migrate().await?;
    if args.output.json {
        return output::json(&json!({"database": target.url.to_string(), "steps": steps}));
    }
    if steps.is_empty() {
        return output::line(format!("{}: up to date", target.url));
    }
    for step in steps {
        output::line(step)?;
    }
    Ok(())
}
